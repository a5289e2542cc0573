"""P-EAGLE heads against a plain implementation, and the traps of their folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.draft.heads.load import load_draft_head
from cluster.draft.heads.peagle import DEFAULT_DRAFTS, ParallelHead
from cluster.errors import ConfigError
from tests.draft.heads.test_eagle3 import (
    AUTHORS,
    CAUSAL,
    DIM,
    EMBEDDING,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYER,
    ROWS,
    SPECULATORS,
    TAPS,
    TARGET,
    TOKENS,
    VARIANTS,
    VOCAB,
    attend_causally,
    norms,
    rms,
    tensors,
    written,
)
from tests.support.draft.heads import ByRows

MASK_TOKEN, NUM_LAYERS, NUM_DRAFTS = 7, 3, 4
Tensors = dict[str, torch.Tensor]


def deeper_tensors(num_layers: int, *, has_bias: bool) -> Tensors:
    """Layers after the first, and the biases of all."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    found: Tensors = {}
    sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM, "o": HIDDEN}
    for layer in range(num_layers):
        prefix = f"layers.{layer}."
        for name, size in sizes.items():
            if has_bias:
                found[f"{prefix}self_attn.{name}_proj.bias"] = drawn(size)
            columns = HEADS * DIM if name == "o" else HIDDEN
            found[f"{prefix}self_attn.{name}_proj.weight"] = drawn(size, columns)
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN))):
            found[f"{prefix}mlp.{name}_proj.weight"] = drawn(*shape)
        found[f"{prefix}mlp.down_proj.weight"] = drawn(HIDDEN, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = 1 + drawn(HIDDEN)
    kept = {name: each for name, each in found.items() if not name.startswith("layers.0.")}
    return kept | {name: each for name, each in found.items() if name.endswith("bias")}


def folder_of(
    folder: Path, form: str = "authors", *, mask_shape: tuple[int, ...] = (1, 3 * HIDDEN),
    keys: Mapping[str, Any] | None = None, num_layers: int = NUM_LAYERS, **extra: torch.Tensor,
) -> tuple[Path, dict[str, Any], Tensors]:  # fmt: skip
    """A head of several layers with biases; its folder, configuration and tensors."""
    own = {"num_hidden_layers": num_layers, "attention_bias": True}
    if form == "authors":
        prefix, config = "midlayer.", {**AUTHORS, **own, "ptd_token_id": MASK_TOKEN}
    else:
        prefix = "layers.0."
        methods = [{"proposal_type": "greedy", "speculative_tokens": NUM_DRAFTS}]
        config = {
            **SPECULATORS, "speculators_model_type": "peagle", "mask_token_id": MASK_TOKEN,
            "transformer_layer_config": {**LAYER, **own},
            "speculators_config": {
                "proposal_methods": methods, "default_proposal_method": "greedy",
            },
        }  # fmt: skip
    mask = torch.randn(3 * HIDDEN, generator=torch.Generator().manual_seed(6))
    deeper = deeper_tensors(num_layers, has_bias=True)
    first = {name.replace("layers.0.", prefix): each for name, each in deeper.items()}
    held = {**tensors(prefix), **first, "mask_hidden": mask.view(mask_shape), **extra}
    config = {**config, **(keys or {})}
    return written(folder, config, held), config, held


def loaded(folder: Path) -> ParallelHead:
    head = load_draft_head(folder, TARGET, {"embedding": EMBEDDING}.__getitem__)
    assert isinstance(head, ParallelHead)
    return head


def plain_drafts(held: Tensors, config: Mapping[str, Any]) -> torch.Tensor:
    """The head written out once more, over a text of ROWS rows whose last one is the first of the
    pass: its logits of all rows of the pass."""
    ids = torch.cat((TOKENS, torch.full((NUM_DRAFTS - 1,), MASK_TOKEN)))
    taps = torch.cat((TAPS, held["mask_hidden"].flatten().expand(NUM_DRAFTS - 1, -1)))
    if config.get("norm_before_fc"):
        taps = rms(taps, held["input_norm.weight"])
    if config.get("fc_norm"):
        parts = taps.split(HIDDEN, dim=1)
        taps = torch.cat([rms(p, held[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], 1)
    hidden = taps @ held["fc.weight"].T
    count = len(ids)
    angles = torch.arange(count)[:, None] / 10000.0 ** (torch.arange(0, DIM, 2) / DIM)
    cos, sin = (torch.cat([f(angles)] * 2, 1)[:, None] for f in (torch.cos, torch.sin))

    def rotated(rows: torch.Tensor) -> torch.Tensor:
        first, second = rows[..., : DIM // 2], rows[..., DIM // 2 :]
        return rows * cos + torch.cat([-second, first], -1) * sin

    for layer in range(int(config.get("num_hidden_layers", NUM_LAYERS))):
        prefix = f"layers.{layer}."
        if f"{prefix}input_layernorm.weight" not in held:
            prefix = "midlayer."

        def of(name: str, prefix: str = prefix) -> torch.Tensor:
            return held[f"{prefix}{name}"]

        residual = hidden
        if layer == 0:
            normed = rms(hidden, of("hidden_norm.weight"))
            given = torch.cat([rms(EMBEDDING[ids], of("input_layernorm.weight")), normed], dim=1)
            residual = normed if config.get("norm_before_residual") else hidden
        else:
            given = rms(hidden, of("input_layernorm.weight"))
        query, key, value = (
            (given @ of(f"self_attn.{n}_proj.weight").T + of(f"self_attn.{n}_proj.bias")).view(
                count, -1, DIM
            )
            for n in ("q", "k", "v")
        )
        attended = attend_causally(rotated(query), rotated(key), value).reshape(count, -1)
        out = attended @ of("self_attn.o_proj.weight").T + of("self_attn.o_proj.bias")
        hidden = residual + out
        inner = rms(hidden, of("post_attention_layernorm.weight"))
        gate = torch.nn.functional.silu(inner @ of("mlp.gate_proj.weight").T)
        hidden = (
            hidden + (gate * (inner @ of("mlp.up_proj.weight").T)) @ of("mlp.down_proj.weight").T
        )
    return (rms(hidden, held["norm.weight"]) @ held["lm_head.weight"].T)[ROWS - 1 :]


def drafted(head: ParallelHead) -> torch.Tensor:
    """What the head drafts behind the same text, whose rows are read first."""
    with torch.no_grad():
        fused = head.fuse(TAPS)
        before = slice(0, ROWS - 1)
        held = head.keys_values(
            TOKENS[before], fused[before], torch.arange(ROWS - 1),
            CAUSAL,
        )  # fmt: skip

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            keys, values = held[layer]
            padding = query.new_zeros(len(keys), *query.shape[1:])
            found = attend_causally(
                torch.cat((padding, query)), torch.cat((keys, key)), torch.cat((values, value))
            )
            return found[len(keys) :]

        place, plan = torch.tensor([ROWS - 1]), ByRows(attend)
        rows = head.draft(TOKENS[-1:], fused[-1:], place, NUM_DRAFTS, plan)
        return head.logits(rows[0])


@pytest.mark.parametrize("form", ["authors", "speculators"])
@pytest.mark.parametrize(("keys", "extra"), VARIANTS)
def test_drafts_equal_a_plain_implementation(
    form: str, keys: dict[str, bool], extra: tuple[str, ...], tmp_path: Path
) -> None:
    """Of three layers, in every variant of the norms, whichever way the mask row is written."""
    shape = (1, 3 * HIDDEN) if form == "authors" else (1, 1, 3 * HIDDEN)
    folder, config, held = folder_of(tmp_path, form, mask_shape=shape, keys=keys, **norms(*extra))
    head = loaded(folder)
    torch.testing.assert_close(drafted(head), plain_drafts(held, config), rtol=1e-4, atol=1e-4)
    assert torch.equal(head.token_map, 2 * torch.arange(len(head.token_map)))


def test_the_row_of_a_mask_is_fused_as_the_targets_are(tmp_path: Path) -> None:
    """A mask row put in behind `fc` would give other drafts: it has the size of the taps."""
    folder, config, held = folder_of(tmp_path)
    other = {**held, "mask_hidden": held["mask_hidden"] + 1}
    assert not torch.allclose(drafted(loaded(folder)), plain_drafts(other, config), atol=1e-2)


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id", "mask_token_id"])
def test_the_mask_token_is_found_under_every_name(key: str, tmp_path: Path) -> None:
    keys = {"ptd_token_id": None, "parallel_drafting": True, key: 9}
    assert loaded(folder_of(tmp_path, keys=keys)[0]).mask_token_id == 9


def test_a_head_of_one_layer_needs_no_number_of_layers(tmp_path: Path) -> None:
    folder, _, _ = folder_of(tmp_path, num_layers=1)
    assert loaded(folder).num_layers == 1


def test_the_folder_says_how_many_tokens_a_pass_drafts(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert loaded(folder_of(tmp_path / "a", "speculators")[0]).num_drafts == NUM_DRAFTS
    assert loaded(folder_of(tmp_path / "b")[0]).num_drafts == DEFAULT_DRAFTS


def test_a_norm_that_deeper_layers_do_not_use_may_be_there(tmp_path: Path) -> None:
    surplus = {"layers.1.hidden_norm.weight": torch.ones(HIDDEN)}
    folder, config, held = folder_of(tmp_path, **surplus)
    torch.testing.assert_close(
        drafted(loaded(folder)), plain_drafts(held, config), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("keys", "extra", "said"),
    [
        (
            {"ptd_token_id": None, "parallel_drafting": True}, {},
            r"names no mask token \(pard_token, ptd_token_id, mask_token_id\)",
        ),
        ({"ptd_token_id": VOCAB}, {}, "mask token 50 is none of the target's 50"),
        ({"num_hidden_layers": 2}, {}, r"nothing is known of deeper\.1"),
        ({"num_hidden_layers": 4}, {}, r"it lacks deeper\.2"),
        ({}, {"mask_hidden": torch.zeros(HIDDEN)}, r"mask_hidden has the shape \[32\]"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, {}, "sliding window"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(
    keys: dict[str, Any], extra: Tensors, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(folder_of(tmp_path, keys=keys, **extra)[0])


def test_without_its_mask_row_it_is_refused(tmp_path: Path) -> None:
    _, config, held = folder_of(tmp_path)
    del held["mask_hidden"]
    with pytest.raises(ConfigError, match="it lacks mask_hidden"):
        loaded(written(tmp_path, config, held))
