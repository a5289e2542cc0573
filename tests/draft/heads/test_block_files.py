"""What the files of a DFlash or DSpark say of it is read, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.draft.heads.block import default_taps
from cluster.errors import ConfigError
from tests.support.draft.block_forms import (
    DFLASH,
    DFLASH_2,
    DSPARK,
    SECOND,
    SPECULATORS,
    loaded,
    tensors,
)


def test_authors_name_layers_by_their_outputs_and_speculators_counts_taps(tmp_path: Path):
    assert loaded(tmp_path, DFLASH).spec.taps == (2, 5, 7)
    assert loaded(tmp_path, DSPARK).spec.taps == (2, 5, 7)
    assert loaded(tmp_path, SPECULATORS).spec.taps == (2, 5, 7)


def test_taps_that_nobody_names_are_spread_over_the_target():
    assert default_taps(36, 5) == (2, 10, 18, 26, 34)
    assert default_taps(28, 1) == (15,)
    assert default_taps(9, 3) == (2, 5, 7)  # 3.5 is rounded to the even number, as the authors do


def test_keys_stand_in_dflash_config_too(tmp_path: Path):
    moved = {key: value for key, value in DFLASH.items() if key != "block_size"}
    moved["dflash_config"] = {**DFLASH["dflash_config"], "block_size": 3}
    assert loaded(tmp_path, moved).spec.block_size == 3


@pytest.mark.parametrize(
    ("keys", "sights"),
    [
        ({}, [(None, False), (None, False)]),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
            [(5, True), (None, False)],
        ),
        (
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 5,
                "is_causal": False,
            },
            [(5, False), (None, False)],
        ),
        (
            {"dflash_config": {**DFLASH["dflash_config"], "use_swa": True, "swa_window_size": 6}},
            [(6, False), (6, False)],
        ),
    ],
)
def test_windows_and_causality_are_read(
    keys: dict[str, Any], sights: list[tuple[int | None, bool]], tmp_path: Path
):
    spec = loaded(tmp_path, {**DFLASH, **keys}).spec
    assert [(sight.window, sight.is_causal) for sight in spec.sights] == sights


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        ({**DFLASH, "num_target_layers": 8}, {}, "num_target_layers is 8, the target's 9"),
        ({**DFLASH, "vocab_size": 60}, {}, "vocab_size is 60, the target's 50"),
        ({**DFLASH, "block_size": None}, {}, "block_size None; it must be a number"),
        ({**DFLASH, "block_size": 1}, {}, "block_size is 1, which drafts nothing"),
        (
            {**DFLASH, "dflash_config": {"mask_token_id": 50, "target_layer_ids": [1, 4, 6]}},
            {},
            "mask_token_id is 50, the embedding has 50 rows",
        ),
        (
            {**DFLASH, "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 4, 9]}},
            {},
            r"taps layers \[10\]; the target has 9",
        ),
        (DFLASH, {"fc.weight": None}, "lacks fc.weight"),
        (DFLASH, {"layers.0.self_attn.sinks": torch.zeros(4)}, "nothing is known of layers.0"),
        (
            DFLASH,
            {"candidate_selector.hidden_projection.weight": torch.zeros(1)},
            "nothing is known of candidate_selector",
        ),
        ({**DFLASH, "selector_rank": 4}, {}, "conv_kernel_size None; it must be a number"),
        (
            {**DFLASH, "architectures": ["DFlash2DraftModel"]},
            {},
            "conv_kernel_size None; it must be a number",
        ),
        (
            {**DFLASH, **SECOND, "conv_group_size": 5},
            {},
            "hidden size 32 is no multiple of its conv_group_size 5",
        ),
        (DFLASH_2, {"layers.1.mlp_conv.base_kernel": None}, r"lacks layers\.1\.mlp_conv\.base"),
        ({**SPECULATORS, "projector_type": "domino"}, {}, "Domino block drafter"),
        ({**DSPARK, "markov_head_type": "fir"}, {}, "markov_head_type is 'fir'; known: vanilla"),
        ({**DSPARK, "markov_rank": 0}, {}, "needs a markov_rank above 0"),
        ({**SPECULATORS, "draft_vocab_size": 20}, {"d2t": None}, "it has no d2t"),
        ({**DFLASH, "is_neox_style": False}, {}, "rotary embedding is interleaved"),
        (
            {**SPECULATORS, "aux_hidden_state_layer_ids": None},
            {},
            "names no aux_hidden_state_layer_ids",
        ),
        (
            {**DFLASH, "layer_types": ["sliding_attention", "full_attention"]},
            {},
            "sliding window of no stated size",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    config: dict[str, Any], change: dict[str, torch.Tensor | None], said: str, tmp_path: Path
):
    held = {**tensors(config), **change}
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path, config, kept)
