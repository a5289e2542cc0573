"""Multi-token-prediction layers inside their targets: what they keep, draft and save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core import SamplingParams
from tests.draft.heads.test_eagle3 import CAUSAL
from tests.draft.test_eagle3 import check_cache, rows_of
from tests.support.draft.inside import GREEDY, LAWS, SAMPLED, Inside, config_of, mean_accepted
from tests.support.draft.mtp import SIZE, right_mtp, with_mtp
from tests.support.engine.driver import load_oracle, prompt
from tests.support.worker.rounds import Session


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
    inside.decode_checked(lambda rows, text: check_cache(inside, oracle, rows.request_id, text))


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
    inside.draw(session)
    inside.tree(session, 8)
    tree = inside.drafter._requests.find("a").tree
    fused, *_, logits = rows_of(inside, oracle, session.tokens)
    torch.testing.assert_close(found[0][1], logits[-1], atol=1e-4, rtol=1e-4)
    assert len(found) > 4
    with torch.inference_mode():
        for node, got in found[1:]:
            ids, hidden = torch.tensor(session.tokens)[1:], fused[:-1]
            for token in [*tree.path_tokens(node), None]:
                out = head(ids, hidden, torch.arange(len(ids)), CAUSAL)
                if token is not None:
                    ids = torch.cat((ids, torch.tensor([token])))
                    hidden = torch.cat((hidden, head.handed_on(out)[-1:]))
            torch.testing.assert_close(got, head.logits(out)[-1], atol=1e-4, rtol=1e-4)


@LAWS
def test_a_layer_that_is_right_saves_steps(params: SamplingParams, tmp_path: Path) -> None:
    target = right_mtp(tmp_path)
    inside = Inside(config_of(target, "mtp", target))
    session = Session("a", [5, 6, 7, 8], params)
    inside.decode([session], 120)
    assert mean_accepted(session) > (1.5 if params is SAMPLED else 5.0)


def test_a_layer_of_nan_drafts_nothing(tmp_path: Path) -> None:
    with_mtp("glm4-moe", tmp_path, eh_proj__weight=torch.full((SIZE, 2 * SIZE), float("nan")))
    inside = Inside(config_of(tmp_path, "mtp", tmp_path))
    inside.check_silent()
