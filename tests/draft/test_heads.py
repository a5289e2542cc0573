"""The contract of all drafters with a draft head: what they keep of a text, when they draft, what
that saves, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.config.schema import DrafterConfig
from cluster.core import SamplingParams
from cluster.draft.registry import check
from cluster.engine.device import convert
from cluster.errors import ConfigError
from tests.support.choices import by_day
from tests.support.draft.heads import cyclic_target
from tests.support.draft.inside import GREEDY, LAWS, SAMPLED, Inside, config_of, mean_accepted
from tests.support.draft.kinds import KINDS, check_kept
from tests.support.engine.driver import load_oracle, prompt
from tests.support.worker.rounds import Session

ALL = pytest.mark.parametrize("name", KINDS)
# Those that keep something in the target's pages.
KEEPING = tuple(name for name in KINDS if name != "medusa")
FEW_PAGES: dict[str, Any] = {"num_pages": 20}
UNCACHED: dict[str, Any] = {"prefix_cache": False}


CASES: Any = [
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
    with pytest.raises(ConfigError, match=said):
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
    with pytest.raises(ConfigError, match=rf"drafters\.head\.options\.{message}"):
        check("head", DrafterConfig(kind=KINDS[name].kind, options=given))
