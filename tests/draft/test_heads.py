"""The contract of all drafters with a draft head: what they keep of a text, when they draft, what
that saves, and what is refused; and what their trees are made of, against plain forwards of whole
texts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cluster.config.schema import DrafterConfig
from cluster.core import SamplingParams
from cluster.draft.registry import check
from cluster.engine.device import convert
from cluster.spec.noise import gumbel
from cluster.spec.tree import depths
from tests.support.choices import by_day
from tests.support.draft.block_forms import SECOND
from tests.support.draft.blocks import random_block, right_block
from tests.support.draft.heads import cyclic_target, right_medusa, written
from tests.support.draft.inside import GREEDY, LAWS, SAMPLED, Inside, config_of, mean_accepted
from tests.support.draft.kinds import KINDS, check_kept, kept_of
from tests.support.draft.plain import CAUSAL, behind
from tests.support.engine.driver import load_oracle, prompt
from tests.support.engine.taps import expected_taps
from tests.support.errors import config_error
from tests.support.worker.rounds import Session

ALL = pytest.mark.parametrize("name", KINDS)
# Those that keep something in the target's pages.
KEEPING = tuple(name for name in KINDS if name != "medusa")
FEW_PAGES = {"num_pages": 20}
UNCACHED = {"prefix_cache": False}
CASES = [
    ("eagle3", "llama", FEW_PAGES),
    ("eagle3", "llama", UNCACHED),
    ("eagle3", "mistral-sliding", {}),
    ("eagle3", "mistral-sliding", UNCACHED),
    ("eagle3", "gemma2", FEW_PAGES),
    ("peagle", "llama", {}),
    ("peagle", "llama", UNCACHED),
    ("peagle", "mistral-sliding", FEW_PAGES),
    ("dspark", "llama", {"num_pages": 44}),
    ("dspark", "mistral-sliding", {}),
    ("dspark", "mistral-sliding", UNCACHED),
    ("mtp", "llama", {}),
    ("mtp", "llama", {"num_pages": 44}),
    ("mtp-latent", "llama", FEW_PAGES),
    ("mtp-apart", "llama", FEW_PAGES),
]


@pytest.mark.parametrize(("name", "architecture", "settings"), by_day(CASES[::2], CASES))
def test_what_it_keeps_is_right_after_chunks_hits_accepted_paths_and_preemptions(
    name: str,
    architecture: str,
    settings: dict[str, Any],
    tmp_path: Path,
    checkpoint_factory: Callable[..., Path],
):
    """A deeper layer's keys depend on all rows before them, of earlier steps and of pages that
    another request wrote."""
    # With heads of this size a forward of the model's layers may be native.
    is_native = name == "eagle3" and settings is UNCACHED
    folder = checkpoint_factory(architecture, **({"head_dim": 16} if is_native else {}))
    inside = KINDS[name].inside(folder, tmp_path, max_batch_tokens=24, **settings)
    oracle = load_oracle(tmp_path if KINDS[name].kind == "mtp" else folder)
    sessions = inside.decode_checked(
        lambda rows, text: check_kept(inside, oracle, rows.request_id, text)
    )
    if settings is FEW_PAGES and (name, architecture) == ("eagle3", "llama"):
        assert sum(session.num_misses for session in sessions) > 0


@ALL
def test_without_the_last_row_nothing_is_drafted(name: str, llama_folder: Path, tmp_path: Path):
    """What is missing further up is left out."""
    inside = KINDS[name].inside(llama_folder, tmp_path, max_batch_tokens=16)
    session = Session("a", prompt(40).tolist(), GREEDY)
    inside.lose_steps(2, 5)
    inside.draw(session)
    if name in KEEPING:
        cache, tokens = inside.drafter._cache, np.array(session.tokens, np.int32)
        first = int(inside.drafter._head.takes_before)
        held = [*range(first, 16), *range(32, 40)]
        assert cache.read("a", tokens).positions.tolist() == held
        cache._context_len = 6
        assert cache.read("a", tokens).positions.tolist() == held[-6:]
        cache._context_len = 2048
    lengths = [len(inside.tree(session, 8))]
    for _ in range(3):
        inside.draw(session)
        lengths.append(len(inside.tree(session, 8)))
    assert lengths[2] == 0
    assert min(lengths[:2] + lengths[3:]) > 0
    # A pass that fails is repeated.
    inside.draw(session)
    with pytest.MonkeyPatch.context() as failing:
        failing.setattr(inside.drafter, "_ranked", None)
        with pytest.raises(TypeError):
            inside.tree(session, 8)
    assert len(inside.tree(session, 8))


@pytest.mark.parametrize("name", [name for name in KINDS if name != "dflash"])
@LAWS
def test_a_head_that_is_right_saves_steps(name: str, params: SamplingParams, tmp_path: Path):
    kind = KINDS[name]
    head = kind.right(tmp_path / "head")
    target = head if kind.kind == "mtp" else cyclic_target(tmp_path / "target")
    inside = Inside(config_of(target, kind.kind, head))
    session = Session("a", [5, 6, 7, 8], params)
    inside.decode([session], 60)
    assert mean_accepted(session) > kind.least[params is SAMPLED]


@ALL
def test_a_head_of_nan_drafts_nothing(name: str, llama_folder: Path, tmp_path: Path):
    KINDS[name].inside(llama_folder, tmp_path, fill=float("nan")).check_silent()


@pytest.mark.parametrize(
    ("name", "other"),
    [("eagle3", "peagle"), ("peagle", "eagle3"), ("medusa", "dspark"), ("dspark", "medusa")],
)
def test_a_head_of_another_kind_is_refused_by_name(
    name: str, other: str, llama_folder: Path, tmp_path: Path
):
    """An EAGLE-3 drafter would run a P-EAGLE head one token at a time, as it was never trained."""
    kind = KINDS[name]
    head = KINDS[other].random(tmp_path, llama_folder)
    said = f"it holds no {kind.called}; it is read by the kind of drafter {KINDS[other].kind}"
    with config_error(said):
        Inside(config_of(llama_folder, kind.kind, head))


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_an_embedding_that_it_has_from_the_target_is_no_copy(
    name: str, checkpoint_factory: Callable[..., Path], tmp_path: Path
):
    target = checkpoint_factory("llama", dtype=torch.bfloat16)
    inside = KINDS[name].inside(target, tmp_path)
    embedding = inside.engine.model.module.get_input_embeddings().weight
    assert inside.drafter._head.embed_tokens.weight.data_ptr() == embedding.data_ptr()


@pytest.mark.parametrize("name", ["eagle3", "dspark", "mtp-apart"])
def test_the_rotary_frequencies_are_not_rounded_with_the_weights(
    name: str, llama_folder: Path, tmp_path: Path
):
    head = KINDS[name].inside(llama_folder, tmp_path).drafter._head
    frequencies = head.rotary.inv_freq.clone()
    convert(head, torch.bfloat16)
    assert head.norm.weight.dtype is torch.bfloat16
    assert torch.equal(head.rotary.inv_freq, frequencies)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {}, "model: missing") for name in KINDS),
        *(
            (name, {"num_children": 40}, "num_children: 40 exceeds")
            for name in ("eagle3", "peagle", "medusa", "mtp")
        ),
    ],
)
def test_bad_options_are_named(name: str, options: dict[str, Any], message: str):
    given = {"model": "x", **options} if options else {}
    with config_error(rf"drafters\.head\.options\.{message}"):
        check("head", DrafterConfig(kind=KINDS[name].kind, options=given))


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}


def rows_of(inside: Inside, oracle: Any, tokens: Sequence[int], num_rows: int) -> torch.Tensor:
    """What `Head.block` gives behind a text: [drafts, hidden]."""
    head, length = inside.drafter._head, len(tokens)
    kept, fused = kept_of(inside, oracle, tokens[:-1])
    place, plan = torch.tensor([length - 1 - head.takes_before]), behind(kept, head.sights)
    with torch.inference_mode():
        return head.block(torch.tensor(tokens[-1:]), fused[-1:], place, num_rows, plan)[0]


@pytest.mark.parametrize("name", ["eagle3", "mtp", "mtp-latent", "mtp-apart"])
def test_the_logits_of_root_and_nodes_are_those_of_a_plain_forward(
    name: str, llama_folder: Path, tmp_path: Path
):
    """Behind a prefix hit, too; a node's path is fed the head's own outputs."""
    inside = KINDS[name].inside(llama_folder, tmp_path, max_batch_tokens=16)
    oracle = load_oracle(tmp_path if KINDS[name].kind == "mtp" else llama_folder)
    found = []
    head, run = inside.drafter._head, inside.drafter._logits

    def recorded(rows):
        logits = run(rows)
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
    if keys is None:
        kind, head = "peagle", KINDS["peagle"].random(tmp_path, llama_folder)
    else:
        kind, head = "block", random_block(tmp_path, llama_folder, spark=False, **keys)
    inside = Inside(config_of(llama_folder, kind, head, max_batch_tokens=16))
    oracle, drafter = load_oracle(llama_folder), inside.drafter
    found = {}
    draft, block = drafter._draft, drafter._head.block

    def recorded(requests, *others):
        texts = [tuple(each.text.token_ids.tolist()) for each in requests]

        def pass_(*given):
            rows = block(*given)
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
    for params in (GREEDY, SAMPLED):
        session = Session(f"{params.temperature}", [5, 6, 7, 8], params)
        inside.draw(session)
        (proposal,) = inside.drafter.propose([inside.told(session, 8)])
        found.append(proposal.survival)
    sure = torch.sigmoid(torch.tensor(3.0)).item()
    assert found[0].tolist() == pytest.approx([sure**depth for depth in range(1, 7)], abs=1e-5)
    assert not np.allclose(*found)


def test_a_vocabulary_out_of_order_is_read_by_its_map(tmp_path: Path):
    """In vLLM's form a token map need not ascend."""
    target = cyclic_target(tmp_path / "target")
    held = load_file(right_medusa(tmp_path / "head") / "medusa_lm_head.safetensors")
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))[:22]
    named = {"token_map": order}
    for head in range(3):
        named[f"blocks.{head}.layers.0.weight"] = held[f"{head}.0.linear.weight"]
        named[f"lm_heads.{head}.weight"] = held[f"{head}.1.weight"][order]
    folder = written(tmp_path / "mapped", {"model_type": "medusa", "num_heads": 3}, named)
    inside = Inside(config_of(target, "medusa", folder))
    session = Session("a", [5, 6, 7, 8], GREEDY)
    inside.decode([session], 120)
    assert mean_accepted(session) > 2.0
