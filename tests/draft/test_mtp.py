"""Multi-token-prediction layers inside their targets: what they keep, draft and save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core import SamplingParams
from cluster.draft.inside import StepRows
from tests.draft.heads.test_eagle3 import attend_causally
from tests.draft.test_eagle3 import check_cache, rows_of
from tests.support.draft.inside import Inside, config_of
from tests.support.draft.mtp import SIZE, right_mtp, with_mtp
from tests.support.engine.driver import load_oracle, prompt
from tests.support.worker.rounds import Session

GREEDY = SamplingParams(temperature=0.0, max_tokens=256)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=256)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp") / "glm"
    with_mtp("glm4-moe", folder)
    return folder


@pytest.mark.parametrize("settings", [{}, {"num_pages": 44}])
def test_what_it_keeps_is_right_after_chunks_hits_accepted_paths_and_preemptions(
    settings: dict[str, Any], glm: Path
) -> None:
    inside = Inside(config_of(glm, "mtp", glm, max_batch_tokens=24, **settings))
    oracle = load_oracle(glm)
    shared = prompt(30, seed=5).tolist()
    sessions = [Session(str(i), shared + prompt(i * 9, seed=i).tolist(), GREEDY) for i in range(3)]
    num_checked = 0

    def checked(rows: Sequence[StepRows]) -> None:
        nonlocal num_checked
        inside.drafter.read(rows)
        for each in rows:
            if each.next_token is not None:
                text = sessions[int(each.request_id)].tokens[: each.first_position]
                text = [*text, *each.token_ids[each.text_rows].tolist()]
                check_cache(inside, oracle, each.request_id, text)
                num_checked += 1

    inside.after_step = checked
    for session in sessions[:1]:  # the others then find its beginning in the prefix cache
        inside.decode([session], 6)
    inside.decode(sessions[1:], 12)
    assert num_checked >= 12


def test_the_logits_of_root_and_nodes_are_those_of_a_plain_forward(glm: Path) -> None:
    inside = Inside(config_of(glm, "mtp", glm, max_batch_tokens=16))
    oracle, head = load_oracle(glm), inside.drafter._head
    found: list[tuple[int, torch.Tensor]] = []
    run = inside.drafter._run

    def recorded(rows: Sequence[Any]) -> torch.Tensor:
        logits: torch.Tensor = run(rows)
        found.extend((node, each) for (_, node), each in zip(rows, logits, strict=True))
        return logits

    inside.drafter._run = recorded
    session = Session("a", prompt(27).tolist(), GREEDY)
    inside.verifier.submit([session.item()])
    while inside.verifier.has_pending:
        frame = inside.verifier.step()
    session.take(frame.verdicts[0])
    inside.tree(session, 8)
    tree = inside.drafter._requests.find("a").tree
    fused, *_, logits = rows_of(inside, oracle, session.tokens)
    torch.testing.assert_close(found[0][1], logits[-1], atol=1e-4, rtol=1e-4)
    assert len(found) > 4
    with torch.inference_mode():
        for node, got in found[1:]:
            ids, hidden = torch.tensor(session.tokens)[1:], fused[:-1]
            for token in [*tree.path_tokens(node), None]:
                out = head(ids, hidden, torch.arange(len(ids)), attend_causally)
                if token is not None:
                    ids = torch.cat((ids, torch.tensor([token])))
                    hidden = torch.cat((hidden, head.handed_on(out)[-1:]))
            torch.testing.assert_close(got, head.logits(out)[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_layer_that_is_right_saves_steps(params: SamplingParams, tmp_path: Path) -> None:
    target = right_mtp(tmp_path)
    inside = Inside(config_of(target, "mtp", target))
    session = Session("a", [5, 6, 7, 8], params)
    inside.decode([session], 120)
    accepted = sum(len(verdict.path) for verdict in session.verdicts) / len(session.verdicts)
    assert accepted > (1.5 if params is SAMPLED else 5.0)


def test_a_layer_of_nan_drafts_nothing(tmp_path: Path) -> None:
    with_mtp("glm4-moe", tmp_path, eh_proj__weight=torch.full((SIZE, 2 * SIZE), float("nan")))
    inside = Inside(config_of(tmp_path, "mtp", tmp_path))
    inside.decode([Session("a", prompt(9).tolist(), GREEDY)], 10)
    assert inside.trees
    assert all(len(tree) == 0 for tree in inside.trees)
