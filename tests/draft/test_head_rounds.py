"""Rounds that graphs grow on the device, against the trees that the host grows pass by pass."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.core import Proposal, SamplingParams
from tests.support.choices import by_day
from tests.support.draft.inside import Inside
from tests.support.draft.kinds import KINDS
from tests.support.engine.captures import Failing, Recorder
from tests.support.engine.driver import prompt
from tests.support.worker.rounds import Session

# Those whose trees grow by rounds.
GROWN = ["eagle3", "mtp", "mtp-latent", "mtp-apart"]
GREEDY = {"temperature": 0.0, "max_tokens": 64}
SAMPLED = {"temperature": 1.0, "max_tokens": 64}
LAWS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "cold": SAMPLED | {"temperature": 0.3},
    "truncated": SAMPLED | {"top_p": 0.8, "top_k": 12, "min_p": 0.02},
    "ending": GREEDY | {"max_tokens": 3},
    "stopping": SAMPLED | {"stop_token_ids": tuple(range(0, 280, 40)), "min_tokens": 2},
}


def pair(name: str, target: Path, folder: Path, **options: Any) -> tuple[Inside, Inside, Recorder]:
    """A drafter that grows its trees on the host, and one by graphs."""
    config = KINDS[name].config(target, folder, options={"min_survival": 1e-4, **options})
    recorder = Recorder()
    return Inside(config), Inside(config, recorder), recorder


def grown(inside: Inside, sessions: Sequence[Session], max_nodes: int) -> dict[str, Proposal]:
    """The last proposals for all texts, asked for together."""
    tasks = [inside.told(session, max_nodes) for session in sessions]
    found = {}
    while proposals := inside.drafter.propose(tasks):
        found.update({each.request_id: each for each in proposals})
    return found


def drawn(
    insides: Sequence[Inside], both: Sequence[Sequence[Session]], max_nodes: int
) -> list[dict[str, Proposal]]:
    """What each drafter proposes behind one more token of its texts."""
    found = []
    for inside, sessions in zip(insides, both, strict=True):
        for session in sessions:
            inside.draw(session)
        found.append(grown(inside, sessions, max_nodes))
    return found


def check_alike(first: Mapping[str, Proposal], second: Mapping[str, Proposal]) -> None:
    assert first.keys() == second.keys()
    for name, wanted in first.items():
        found = second[name]
        assert found.tree.token_ids.tolist() == wanted.tree.token_ids.tolist()
        assert found.tree.parents.tolist() == wanted.tree.parents.tolist()
        np.testing.assert_allclose(found.survival, wanted.survival, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", by_day(["eagle3", "mtp-latent"], GROWN))
def test_trees_are_those_of_the_host(name: str, law: str, llama_folder: Path, tmp_path: Path):
    """Of one text to three at a time, step after step, by one calibration."""
    host, graphs, recorder = pair(name, llama_folder, tmp_path)
    sizes = set[int]()
    for seed in range(by_day(3, 6)):
        params = SamplingParams(seed=seed, **LAWS[law])
        texts = [
            prompt(each, seed=seed + each).tolist()
            for each in range(9 + 5 * seed, 10 + 5 * seed + 7 * (seed % 3), 7)
        ]
        both = [
            [Session(f"{seed}-{i}", ids, params) for i, ids in enumerate(texts)] for _ in range(2)
        ]
        for _ in range(2):
            found = drawn((host, graphs), both, 8)
            check_alike(*found)
            sizes |= {len(each.tree) for each in found[0].values()}
        for inside, sessions in zip((host, graphs), both, strict=True):
            inside.verifier.release([each.request_id for each in sessions])
            inside.drafter.release([each.request_id for each in sessions])
    assert recorder.num_replays > 0
    assert graphs.drafter._rounds is not None
    assert max(sizes) == (8 if law != "ending" else 4)


def test_a_large_tree_takes_several_waits_and_is_the_hosts(llama_folder: Path, tmp_path: Path):
    """Narrow passes, so that it takes many."""
    host, graphs, recorder = pair("eagle3", llama_folder, tmp_path, width=3)
    params = SamplingParams(seed=5, **SAMPLED)
    both = [[Session("a", prompt(20).tolist(), params)] for _ in range(2)]
    found = drawn((host, graphs), both, 30)
    check_alike(*found)
    assert len(found[0]["a"].tree) == 30
    # One graph wrote the rows' keys, one ran the roots; two further passes are one wait's.
    assert recorder.num_replays > 1 + 1 + 2


def test_what_a_graph_touches_stays_where_it_is(llama_folder: Path, tmp_path: Path):
    recorder = Recorder(notes_storages=True)
    inside = Inside(KINDS["eagle3"].config(llama_folder, tmp_path), recorder)
    session = Session("a", prompt(20).tolist(), SamplingParams(seed=1, **SAMPLED))
    inside.decode([session], 12)
    assert recorder.num_captures < recorder.num_replays
    for first, *later in recorder.storages:
        assert later
        assert all(each <= first for each in later)


@pytest.mark.parametrize(
    ("change", "num_texts"),
    [
        ({"presence_penalty": 0.5}, 1),
        ({"logit_bias": ((7, 2.0),)}, 1),
        ({"stop_token_ids": tuple(range(100, 109))}, 1),
        ({}, 9),
    ],
)
def test_what_no_round_holds_is_grown_on_the_host(
    change: dict[str, Any], num_texts: int, llama_folder: Path, tmp_path: Path
):
    host, graphs, recorder = pair("eagle3", llama_folder, tmp_path)
    params = SamplingParams(seed=2, **(SAMPLED | change))
    both = [
        [Session(str(i), prompt(9 + i, seed=i).tolist(), params) for i in range(num_texts)]
        for _ in range(2)
    ]
    found = []
    for inside, sessions in zip((host, graphs), both, strict=True):
        for session in sessions:
            inside.draw(session)
        before = recorder.num_replays
        found.append(grown(inside, sessions, 8))
    assert recorder.num_replays == before
    check_alike(*found)
    assert all(len(each.tree) > 0 for each in found[0].values())


def test_where_nothing_can_be_captured_the_host_grows_them(
    llama_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = KINDS["eagle3"].config(llama_folder, tmp_path)
    failing = Failing()
    with caplog.at_level(logging.WARNING):
        broken, plain = Inside(config, failing), Inside(config)
        params = SamplingParams(seed=3, **SAMPLED)
        both = [[Session("a", prompt(20).tolist(), params)] for _ in range(2)]
        for _ in range(3):
            check_alike(*drawn((broken, plain), both, 8))
    assert failing.num_calls == 2
    told = [each.message for each in caplog.records if "CUDA graphs" in each.message]
    assert len(told) == 2


def test_a_head_of_nan_drafts_nothing(llama_folder: Path, tmp_path: Path):
    Inside(KINDS["eagle3"].config(llama_folder, tmp_path, float("nan")), Recorder()).check_silent()
