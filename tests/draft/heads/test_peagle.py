"""P-EAGLE heads against a plain implementation, and the traps of their folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.draft.heads.eagle3 import DEFAULT_DRAFTS, Eagle3Head
from cluster.errors import ConfigError
from tests.draft.heads.test_eagle3 import (
    AUTHORS,
    HIDDEN,
    LAYER,
    NUM_LAYERS,
    ROWS,
    SPECULATORS,
    TAPS,
    TOKENS,
    VARIANTS,
    VOCAB,
    loaded,
    norms,
    plain_logits,
    tensors,
    written,
)
from tests.support.draft.heads import ByRows
from tests.support.draft.plain import CAUSAL
from tests.support.draft.plain import attend as attend_all

MASK_TOKEN, NUM_DRAFTS = 7, 4
Tensors = dict[str, torch.Tensor]


def folder_of(
    folder: Path,
    form: str = "authors",
    *,
    mask_shape: tuple[int, ...] = (1, 3 * HIDDEN),
    keys: Mapping[str, Any] | None = None,
    **extra: torch.Tensor | None,
) -> tuple[Path, dict[str, Any], Tensors]:
    """A head of several layers with biases; its folder, configuration and tensors.

    extra: tensors that it has beside the others, or not at all."""
    own = {"num_hidden_layers": NUM_LAYERS, "attention_bias": True}
    if form == "authors":
        prefix, config = "midlayer.", {**AUTHORS, **own, "ptd_token_id": MASK_TOKEN}
    else:
        prefix = "layers.0."
        methods = [{"proposal_type": "greedy", "speculative_tokens": NUM_DRAFTS}]
        config = {
            **SPECULATORS,
            "speculators_model_type": "peagle",
            "mask_token_id": MASK_TOKEN,
            "transformer_layer_config": {**LAYER, **own},
            "speculators_config": {
                "proposal_methods": methods,
                "default_proposal_method": "greedy",
            },
        }
    mask = torch.randn(3 * HIDDEN, generator=torch.Generator().manual_seed(6))
    own_tensors = {"mask_hidden": mask.view(mask_shape), **extra}
    given = {name: each for name, each in own_tensors.items() if each is not None}
    held = tensors(prefix, num_layers=NUM_LAYERS, has_bias=True, **given)
    config = {**config, **(keys or {})}
    return written(folder, config, held), config, held


def plain_drafts(held: Tensors, config: Mapping[str, Any]) -> torch.Tensor:
    """Behind a text of ROWS rows, whose last one is the first of the pass: its logits of all rows
    of the pass."""
    ids = torch.cat((TOKENS, torch.full((NUM_DRAFTS - 1,), MASK_TOKEN)))
    taps = torch.cat((TAPS, held["mask_hidden"].flatten().expand(NUM_DRAFTS - 1, -1)))
    return plain_logits(held, config, ids, taps)[ROWS - 1 :]


def check_drafts(head: Eagle3Head, config: Mapping[str, Any], held: Tensors) -> None:
    """What the head drafts behind the same text, whose rows are read first."""
    with torch.no_grad():
        fused = head.fuse(TAPS)
        before = slice(0, ROWS - 1)
        kept = head.keys_values(
            TOKENS[before],
            fused[before],
            torch.arange(ROWS - 1),
            CAUSAL,
        )

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            keys, values = kept[layer]
            return attend_all(query, torch.cat((keys, key)), torch.cat((values, value)))

        place, plan = torch.tensor([ROWS - 1]), ByRows(attend)
        rows = head.block(TOKENS[-1:], fused[-1:], place, NUM_DRAFTS, plan)
        expected = plain_drafts(held, config)
        torch.testing.assert_close(head.lm_head(rows[0]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["authors", "speculators"])
@pytest.mark.parametrize(("keys", "extra"), VARIANTS)
def test_drafts_equal_a_plain_implementation(
    form: str, keys: dict[str, bool], extra: tuple[str, ...], tmp_path: Path
):
    """Of three layers, in every variant of the norms, whichever way the mask row is written."""
    shape = (1, 3 * HIDDEN) if form == "authors" else (1, 1, 3 * HIDDEN)
    folder, config, held = folder_of(tmp_path, form, mask_shape=shape, keys=keys, **norms(*extra))
    head = loaded(folder)
    check_drafts(head, config, held)
    assert torch.equal(head.token_map, 2 * torch.arange(len(head.token_map)))


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id", "mask_token_id"])
def test_the_mask_token_is_found_under_every_name(key: str, tmp_path: Path):
    keys = {"ptd_token_id": None, "parallel_drafting": True, key: 9}
    assert loaded(folder_of(tmp_path, keys=keys)[0]).spec.mask_token_id == 9


def test_the_folder_says_how_many_tokens_a_pass_drafts(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert loaded(folder_of(tmp_path / "a", "speculators")[0]).spec.num_drafts == NUM_DRAFTS
    assert loaded(folder_of(tmp_path / "b")[0]).spec.num_drafts == DEFAULT_DRAFTS


def test_a_norm_that_deeper_layers_do_not_use_may_be_there(tmp_path: Path):
    surplus = {"layers.1.hidden_norm.weight": torch.ones(HIDDEN)}
    folder, config, held = folder_of(tmp_path, **surplus)
    check_drafts(loaded(folder), config, held)


@pytest.mark.parametrize(
    ("keys", "extra", "said"),
    [
        (
            {"ptd_token_id": None, "parallel_drafting": True},
            {},
            r"names no mask token \(pard_token, ptd_token_id, mask_token_id\)",
        ),
        ({"ptd_token_id": VOCAB}, {}, "mask token 50 is none of the target's 50"),
        ({"num_hidden_layers": 2}, {}, r"nothing is known of layers\.2"),
        ({"num_hidden_layers": 4}, {}, r"it lacks layers\.3"),
        ({}, {"mask_hidden": None}, "it lacks mask_hidden"),
        ({}, {"mask_hidden": torch.zeros(HIDDEN)}, r"mask_hidden has the shape \[32\]"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, {}, "sliding window"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    keys: dict[str, Any], extra: dict[str, torch.Tensor | None], said: str, tmp_path: Path
):
    with pytest.raises(ConfigError, match=said):
        loaded(folder_of(tmp_path, keys=keys, **extra)[0])
