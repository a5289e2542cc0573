"""What trees of draft heads are made of, against plain forwards of whole texts."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.core import SamplingParams
from cluster.spec.noise import gumbel
from cluster.spec.tree import depths
from tests.support.draft.block_forms import SECOND
from tests.support.draft.blocks import random_block, right_block
from tests.support.draft.heads import ByRows, cyclic_target, right_medusa
from tests.support.draft.inside import GREEDY, LAWS, SAMPLED, Inside, config_of, mean_accepted
from tests.support.draft.kinds import KINDS, kept_of
from tests.support.draft.plain import CAUSAL, attend
from tests.support.engine.driver import load_oracle, prompt
from tests.support.engine.taps import expected_taps
from tests.support.worker.rounds import Session

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}


def rows_of(inside: Inside, oracle: Any, tokens: Sequence[int], num_rows: int) -> torch.Tensor:
    """What `Head.block` gives behind a text: [drafts, hidden]."""
    head, length = inside.drafter._head, len(tokens)
    kept, fused = kept_of(inside, oracle, tokens[:-1])

    def see(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys, values = (torch.cat(pair) for pair in zip(kept[layer], (key, value), strict=True))
        places = torch.arange(len(keys))
        behind = places[-len(query) :, None] - places
        sight = head.sights[layer]
        seen = torch.ones_like(behind, dtype=torch.bool)
        if sight.window:
            seen &= behind < sight.window
        if sight.is_causal:
            seen &= behind >= 0
        return attend(query, keys, values, seen)

    place = torch.tensor([length - 1 - head.takes_before])
    with torch.inference_mode():
        rows: torch.Tensor = head.block(
            torch.tensor(tokens[-1:]), fused[-1:], place, num_rows, ByRows(see)
        )
    return rows[0]


@pytest.mark.parametrize("name", ["eagle3", "mtp", "mtp-latent", "mtp-apart"])
def test_the_logits_of_root_and_nodes_are_those_of_a_plain_forward(
    name: str, llama_folder: Path, tmp_path: Path
):
    """Behind a prefix hit, too; a node's path is fed the head's own outputs."""
    inside = KINDS[name].inside(llama_folder, tmp_path, max_batch_tokens=16)
    oracle = load_oracle(tmp_path if KINDS[name].kind == "mtp" else llama_folder)
    found: list[tuple[int, torch.Tensor]] = []
    head, run = inside.drafter._head, inside.drafter._logits

    def recorded(rows: Sequence[Any]) -> torch.Tensor:
        logits: torch.Tensor = run(rows)
        found.extend((node, each) for (_, node), each in zip(rows, logits, strict=True))
        return logits

    inside.drafter._logits = recorded
    for request_id in ("a", "b"):
        session = Session(request_id, prompt(27).tolist(), GREEDY)
        inside.draw(session)
        found.clear()
        inside.tree(session, 8)
        tree = inside.drafter._requests.find(request_id).tree
        _, fused = kept_of(inside, oracle, session.tokens)
        assert len(found) > 4
        for node, got in found:
            ids, hidden = torch.tensor(session.tokens)[1:], fused[:-1]
            path = tree.path_tokens(node)
            with torch.inference_mode():
                for token in [*path, None]:
                    out = head(ids, hidden, torch.arange(len(ids)), CAUSAL)
                    if token is not None:
                        ids = torch.cat((ids, torch.tensor([token])))
                        hidden = torch.cat((hidden, head.handed_on(out)[-1:]))
                torch.testing.assert_close(got, head.logits(out)[-1], atol=1e-4, rtol=1e-4)
        inside.verifier.release([request_id])


@pytest.mark.parametrize("keys", [None, {}, SLIDING, SLIDING | {"is_causal": False} | SECOND])
def test_a_pass_behind_a_prefix_hit_is_that_of_a_plain_forward(
    keys: dict[str, Any] | None, llama_folder: Path, tmp_path: Path
):
    """Of P-EAGLE, and of blocks with these keys; two texts at a time, of two lengths."""
    kind = "peagle" if keys is None else "block"
    make = partial(random_block, spark=False, **keys or {}) if keys is not None else None
    head = (make or KINDS["peagle"].random)(tmp_path, llama_folder)
    inside = Inside(config_of(llama_folder, kind, head, max_batch_tokens=16))
    oracle, drafter = load_oracle(llama_folder), inside.drafter
    found: dict[tuple[int, ...], torch.Tensor] = {}
    draft, block = drafter._draft, drafter._head.block

    def recorded(requests: Sequence[Any], *others: Any) -> Any:
        texts = [tuple(each.text.token_ids.tolist()) for each in requests]

        def pass_(*given: Any) -> torch.Tensor:
            rows: torch.Tensor = block(*given)
            found.update(zip(texts, rows, strict=True))
            return rows

        drafter._head.block = pass_
        return draft(requests, *others)

    drafter._draft = recorded
    ids = prompt(27).tolist()
    inside.decode([Session("a", ids, GREEDY)], 3)
    sessions = [Session("b", ids, GREEDY), Session("c", ids[:20], GREEDY)]
    inside.decode(sessions, 5)
    drafter._head.block = block
    size = 3 if keys is None else drafter._head.spec.block_size
    for text, rows in found.items():
        wanted = rows_of(inside, oracle, list(text), size)
        torch.testing.assert_close(rows, wanted, atol=1e-4, rtol=1e-4)
    assert len(found) >= 5


@pytest.mark.parametrize("name", ["medusa", "peagle"])
@LAWS
def test_each_depth_has_its_rows_best_tokens_by_the_targets_noise(
    name: str, params: SamplingParams, llama_folder: Path, tmp_path: Path
):
    """After a prompt in chunks; behind every node that goes on stand the same tokens."""
    options = {"num_children": 2, "min_survival": 1e-9, "num_candidates": 64}
    inside = KINDS[name].inside(llama_folder, tmp_path, max_batch_tokens=16, options=options)
    oracle, head = load_oracle(llama_folder), inside.drafter._head
    for request_id, length in (("a", 27), ("b", 11)):
        session = Session(request_id, prompt(length, seed=length).tolist(), params)
        inside.draw(session)
        tree = inside.tree(session, 14)
        with torch.inference_mode():
            if name == "peagle":
                logits = head.lm_head(rows_of(inside, oracle, session.tokens, 3))
            else:
                rows = expected_taps(oracle, np.array(session.tokens[:-1]), (-1,))
                logits = head(rows[-1:, 0])[0]
        reduced = inside.drafter._vocabulary
        ids = np.arange(logits.shape[1]) if reduced is None else reduced.target_ids
        depth = depths(tree.parents)
        for ahead in range(3):
            scores = logits[ahead].double().numpy()
            if params.temperature:
                scores = scores + gumbel(params.noise_key, 1 + ahead, ids, params.stream)
            best = set(ids[np.argsort(-scores)[:2]].tolist())
            assert set(tree.token_ids[depth == ahead + 1].tolist()) == best
        assert tree.parents.tolist().count(-1) == 2
        assert len(tree) == 2 + 4 + 8


@LAWS
def test_a_selector_and_the_targets_noise_choose_the_path(
    params: SamplingParams, llama_folder: Path, tmp_path: Path
):
    """Of DFlash-2: each token among the row's best, scored behind the token before it."""
    folder = random_block(tmp_path, llama_folder, spark=False, **SECOND)
    inside = Inside(config_of(llama_folder, "block", folder, max_batch_tokens=16))
    head, session = inside.drafter._head, Session("a", prompt(27).tolist(), params)
    inside.draw(session)
    tree = inside.tree(session, 14)
    assert tree.parents.tolist() == [-1, 0, 1]
    rows = rows_of(inside, load_oracle(llama_folder), session.tokens, head.spec.block_size)
    token, differs = session.tokens[-1], False
    with torch.inference_mode():
        for depth, row in enumerate(rows):
            own, before = head.logits(row)[None], torch.tensor([token])
            scores = head.candidate_selector(own, head.token_map, row[None], before)[0].numpy()
            if params.temperature:
                ids = np.arange(len(scores))
                scores = scores + gumbel(params.noise_key, 1 + depth, ids, params.stream)
            token = int(np.argmax(scores))
            assert tree.token_ids[depth] == token
            differs |= token != int(own.argmax())
    assert differs


def test_greedy_survival_is_what_the_confidence_head_says(tmp_path: Path):
    target = cyclic_target(tmp_path / "target")
    inside = Inside(config_of(target, "block", right_block(tmp_path / "head")))
    found = []
    propose = inside.drafter.propose

    def recorded(tasks: Any) -> Any:
        proposals = propose(tasks)
        found.extend(each.survival for each in proposals)
        return proposals

    inside.drafter.propose = recorded
    for params in (GREEDY, SAMPLED):
        inside.decode([Session(f"{params.temperature}", [5, 6, 7, 8], params)], 2)
    sure = torch.sigmoid(torch.tensor(3.0)).item()
    assert found[0].tolist() == pytest.approx([sure**depth for depth in range(1, 7)], abs=1e-5)
    assert not np.allclose(found[-1], found[0])


def test_a_vocabulary_out_of_order_is_read_by_its_map(tmp_path: Path):
    """In vLLM's form a token map need not ascend."""
    target = cyclic_target(tmp_path / "target")
    held = load_file(right_medusa(tmp_path / "head") / "medusa_lm_head.safetensors")
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))[:22]
    named = {"token_map": order}
    for head in range(3):
        named[f"blocks.{head}.layers.0.weight"] = held[f"{head}.0.linear.weight"]
        named[f"lm_heads.{head}.weight"] = held[f"{head}.1.weight"][order]
    folder = tmp_path / "mapped"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa", "num_heads": 3}))
    save_file(named, folder / "model.safetensors")
    inside = Inside(config_of(target, "medusa", folder))
    session = Session("a", [5, 6, 7, 8], GREEDY)
    inside.decode([session], 120)
    assert mean_accepted(session) > 2.0
