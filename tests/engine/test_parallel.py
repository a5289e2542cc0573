"""Two ranks say what one says or notice that one is dead; they fall back together or not at all."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.config.schema import EngineConfig
from cluster.engine.cpu import kernels
from cluster.engine.engine import Engine
from cluster.records import frozen
from tests.conftest import python
from tests.support.choices import by_day
from tests.support.draft.heads import random_eagle3
from tests.support.draft.inside import Inside, config_of
from tests.support.engine.driver import Factory, GreedyDecoder, load_engine
from tests.support.engine.interpreter import needs_triton
from tests.support.engine.native import needs_native
from tests.support.engine.rank_process import NUM_TOKENS, PROMPTS, drafted, paced
from tests.support.engine.ranks import TIMEOUT_S, free_address, two_ranks
from tests.support.engine.slowed import SLOW
from tests.support.engine.vote_process import SCENARIOS
from tests.support.errors import config_error

# The last one has layers with a window and without.
ARCHITECTURES = by_day(
    ("llama", "mixtral", "gemma2"),
    ("llama", "qwen3", "mixtral", "qwen3-moe", "phi3", "starcoder2", "gemma4", "gemma2"),
)


@frozen
class Session:
    """What the ranks said, in turn.

    taps, paces, drafts, texts: rank 0, the texts per architecture.  differences: both.
    last_word: of rank 0, when rank 1 was killed."""

    taps: Any
    paces: Any
    drafts: Any
    differences: list[list[str]]
    texts: list[dict[str, list[int]]]
    last_word: str
    exit_code: int


@pytest.fixture(scope="module")
def head(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_eagle3(tmp_path_factory.mktemp("head"), llama_folder)


@pytest.fixture(scope="module")
def session(checkpoint_factory: Factory, head: Path) -> Iterator[Session]:
    """Two ranks that go through all of it, until one of them is killed while they decode."""
    folders = [checkpoint_factory(architecture) for architecture in ARCHITECTURES]
    with two_ranks("rank_process", head, *folders) as (leader, follower):

        def said(rank: subprocess.Popen[str], count: int) -> list[str]:
            return [rank.stdout.readline() for _ in range(count)]

        taps, paces, drafts = (json.loads(line or "null") for line in said(leader, 3))
        differences = [said(leader, 2), said(follower, 2)]
        texts = [json.loads(line or "{}") for line in said(leader, len(ARCHITECTURES))]
        follower.kill()
        last_word, _ = leader.communicate(timeout=TIMEOUT_S)
        yield Session(taps, paces, drafts, differences, texts, last_word.strip(), leader.returncode)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_ranks_give_the_tokens_of_one(
    architecture: str, checkpoint_factory: Factory, session: Session
):
    """Twenty pages are too few for all requests: preemption is repeated on both ranks as well.  The
    first model's steps were measured before, with the beginning of one of the prompts."""
    engine = load_engine(checkpoint_factory(architecture), max_batch_tokens=32)
    expected = GreedyDecoder(engine, PROMPTS, NUM_TOKENS).run()
    assert session.texts[ARCHITECTURES.index(architecture)] == expected


def test_the_leader_notices_a_dead_rank(session: Session):
    assert session.last_word == "worker_error"
    assert session.exit_code == 0


def test_the_leader_reads_taps_where_layers_are_split(session: Session):
    chunks, error, refusal = session.taps
    assert chunks == [["a", 0, 16], ["a", 16, 16], ["a", 32, 9]]
    assert error <= 1e-5
    assert "adapter 3" in refusal


def test_the_first_ranks_clock_bounds_a_chunk_for_all_ranks(session: Session, llama_folder: Path):
    """The second one's own clock would have it read as much as a step may hold."""
    rows, *texts = session.paces
    quick_rows, *expected = paced(load_engine(llama_folder))
    fitting = int((EngineConfig().max_chunk_s - SLOW[0]) / SLOW[1])
    # The first chunk is the largest, for this engine has measured nothing yet.
    assert max(rows[1:]) <= fitting < rows[0] == max(quick_rows)
    assert sum(rows) == sum(quick_rows)
    assert texts == expected


def test_a_draft_head_on_the_first_rank_drafts_as_on_the_only_one(
    session: Session, llama_folder: Path, head: Path
):
    """Its keys lie on pages that all ranks have, though the others keep nothing of it there."""
    alone = drafted(Inside(config_of(llama_folder, "eagle3", head, max_batch_tokens=16)))
    assert session.drafts == alone
    assert any(token_ids for token_ids, _ in alone[1])


@needs_triton
def test_ranks_fuse_layers_and_replay_graphs_together_or_not_at_all(
    checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    fields = {"num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True}
    folder = checkpoint_factory("llama", **fields)
    with two_ranks("graph_process", folder) as ranks:
        said = [each.communicate(timeout=TIMEOUT_S)[0].splitlines() for each in ranks]
    (figures, leads), (follows,) = ([json.loads(line) for line in each] for each in said)
    error, num_replays, num_steps, fallbacks = figures
    assert error < 2e-5
    assert num_replays == num_steps
    assert fallbacks == []
    wanted = ("another rank cannot capture", "another rank cannot use ours")
    wanted += ("no graph today", "no compiler today")
    for reason, words in zip((*leads, *follows), wanted, strict=True):
        assert words in reason


def test_ranks_that_differ_say_so_and_compute_nothing(session: Session):
    """In their settings at load, and in a step of which one of them has lost the cached prefix."""
    for rank, (settings, step) in enumerate(session.differences):
        assert "ranks differ in settings or checkpoint" in settings
        assert "ranks differ in what this step is to run" in step
        assert f"rank {rank} has" in step


def test_a_rank_without_its_group_is_told_how_to_start(llama_folder: Path):
    with config_error("init_rank"):
        Engine.load(EngineConfig(model=str(llama_folder), tensor_parallel=2))


@pytest.mark.parametrize(
    ("architecture", "ranks", "reason"),
    [("llama", 4, "2 key-value heads"), ("gpt2", 2, "no tensor-parallel plan")],
)
def test_what_cannot_be_split_is_refused_before_loading(
    architecture: str, ranks: int, reason: str, checkpoint_factory: Factory
):
    folder = checkpoint_factory(architecture)
    with config_error(reason):
        Engine.load(EngineConfig(model=str(folder), tensor_parallel=ranks))


_LISTENS = """
import os, sys
from cluster.engine.parallel import init_rank, leave_group
from tests.support.deployments.listening import listening
init_rank(0, 1, sys.argv[1])
print(*("loopback" if one.is_on_loopback else one.host for one in listening([os.getpid()])))
leave_group()
"""


def test_a_group_on_loopback_is_reached_from_this_machine_only():
    said = python("-c", _LISTENS, free_address(), GLOO_SOCKET_IFNAME="lo")
    assert set(said.stdout.split()) == {"loopback"}, said.stderr


@frozen
class Votes:
    """settled: what both ranks said of each scenario.  loaded, last_word: of the leader, while the
    other rank was alive and silent."""

    settled: dict[str, list[dict[str, Any]]]
    loaded: str
    last_word: str
    has_ended: bool


@pytest.fixture(scope="module")
def votes(llama_folder: Path) -> Iterator[Votes]:
    """Two ranks that settle in every scenario, and then one is late."""
    scenarios = SCENARIOS if kernels.load() is not None else ()
    with two_ranks("vote_process", llama_folder, *scenarios) as processes:

        def said() -> list[str]:
            return [each.stdout.readline().strip() for each in processes]

        settled = {name: [json.loads(line or "{}") for line in said()] for name in scenarios}
        leader, follower = processes
        loaded, last_word = (leader.stdout.readline().strip() for _ in range(2))
        yield Votes(settled, loaded, last_word, follower.poll() is not None)


@needs_native
def test_all_ranks_fall_back_where_the_check_of_one_fails(votes: Votes):
    first, second = votes.settled["one"]
    assert first["attention"] == second["attention"] == "sdpa"
    # Both have run both checks: a collective of one alone would have had no end.
    assert first["checks"] == second["checks"] == 2
    assert "another rank" in first["fallbacks"][0]
    assert "a layer is wrong" in second["fallbacks"][0]


@needs_native
def test_no_rank_falls_back_where_all_are_right(votes: Votes):
    for each in votes.settled["right"]:
        assert each == {"attention": "native", "fallbacks": [], "checks": 1}


@needs_native
@pytest.mark.parametrize(("scenario", "checks"), [("chosen", 1), ("never", 2)])
def test_all_ranks_refuse_where_there_is_nothing_to_fall_back_to(
    scenario: str, checks: int, votes: Votes
):
    first, second = votes.settled[scenario]
    assert "another rank" in first["error"] or scenario == "never"
    assert second["error"] == "a layer is wrong"
    assert first["checks"] == second["checks"] == checks


def test_a_rank_may_load_for_longer_than_a_collective_may_take(votes: Votes):
    assert votes.loaded == "loaded"
    assert votes.last_word == "worker_error"
    assert not votes.has_ended
