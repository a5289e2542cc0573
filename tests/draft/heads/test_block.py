"""DFlash and DSpark, in every variant, against a plain implementation written from the formulas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cluster.draft.heads.block import BlockHead
from cluster.draft.heads.block_files import default_taps
from cluster.draft.heads.checkpoint import TargetShape
from cluster.draft.heads.load import load_draft_head
from cluster.errors import ConfigError

HIDDEN, HEADS, KV_HEADS, DIM, INNER, LAYERS = 32, 4, 2, 16, 48, 2
VOCAB, DRAFT_VOCAB, TARGET_LAYERS, BLOCK, MASK, RANK = 50, 20, 9, 4, 49, 6
TARGET = TargetShape(HIDDEN, VOCAB, TARGET_LAYERS)
THETA = 5000.0
OWN: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
    "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": THETA, "model_type": "qwen3",
    "max_position_embeddings": 64,
}  # fmt: skip
DFLASH = {
    "architectures": ["DFlashDraftModel"], "block_size": BLOCK, "num_target_layers": TARGET_LAYERS,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 4, 6]}, **OWN,
}  # fmt: skip
SPARK_HEADS = {"markov_rank": RANK, "enable_confidence_head": True}
DSPARK = {
    "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "mask_token_id": MASK,
    "target_layer_ids": [1, 4, 6], "markov_head_type": "vanilla",
    "confidence_head_with_markov": True, **SPARK_HEADS, **OWN,
}  # fmt: skip
SPECULATORS = {
    "speculators_model_type": "dflash", "speculators_version": "0.9", "block_size": BLOCK,
    "mask_token_id": MASK, "aux_hidden_state_layer_ids": [2, 5, 7], "draft_vocab_size": DRAFT_VOCAB,
    "transformer_layer_config": OWN,
}  # fmt: skip
EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
OUTPUT = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
CONTEXT = 7
TAPS = torch.randn(CONTEXT, 3 * HIDDEN, generator=torch.Generator().manual_seed(3))
TOKENS = [3, 17, 8, 11, 30]  # the last known one, then what is drafted


def tensors(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Random ones, as the configuration wants them."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    held = {
        "fc.weight": drawn(HIDDEN, 3 * HIDDEN),
        "hidden_norm.weight": 1 + drawn(HIDDEN),
        "norm.weight": 1 + drawn(HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        shapes = {
            "q": (HEADS * DIM, HIDDEN), "k": (KV_HEADS * DIM, HIDDEN),
            "v": (KV_HEADS * DIM, HIDDEN), "o": (HIDDEN, HEADS * DIM),
        }  # fmt: skip
        for name, shape in shapes.items():
            held[f"{prefix}self_attn.{name}_proj.weight"] = drawn(*shape)
            if config.get("attention_bias"):
                held[f"{prefix}self_attn.{name}_proj.bias"] = drawn(shape[0])
        for name in ("q_norm", "k_norm"):
            held[f"{prefix}self_attn.{name}.weight"] = 1 + drawn(DIM)
        for name in ("input_layernorm", "post_attention_layernorm"):
            held[f"{prefix}{name}.weight"] = 1 + drawn(HIDDEN)
        for name in ("gate", "up"):
            held[f"{prefix}mlp.{name}_proj.weight"] = drawn(INNER, HIDDEN)
        held[f"{prefix}mlp.down_proj.weight"] = drawn(HIDDEN, INNER)
    size = config.get("draft_vocab_size", VOCAB)
    if size != VOCAB:
        held["lm_head.weight"] = drawn(size, HIDDEN)
        held["d2t"] = torch.arange(size)  # target id = 2 i
        held["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    if config.get("markov_rank"):
        held["markov_head.markov_w1.weight"] = drawn(VOCAB, RANK) * 4
        held["markov_head.markov_w2.weight"] = drawn(size, RANK) * 4
        kind = config.get("markov_head_type", "vanilla")
        if kind == "gated":
            held["markov_head.gate_proj.weight"] = drawn(RANK, HIDDEN + RANK)
            held["markov_head.gate_proj.bias"] = drawn(RANK)
        if kind == "rnn":
            held["markov_head.joint_proj.weight"] = drawn(3 * RANK, 2 * RANK + HIDDEN)
            held["markov_head.joint_proj.bias"] = drawn(3 * RANK)
    if config.get("enable_confidence_head"):
        wide = HIDDEN + (RANK if config.get("confidence_head_with_markov") else 0)
        held["confidence_head.proj.weight"] = drawn(1, wide)
        held["confidence_head.proj.bias"] = drawn(1)
    return held


def loaded(
    folder: Path, config: Mapping[str, Any], held: Mapping[str, torch.Tensor] | None = None
) -> BlockHead:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors(config) if held is None else held), folder / "model.safetensors")
    shared = {"embedding": EMBEDDING, "output": OUTPUT}
    head = load_draft_head(folder, TARGET, shared.__getitem__)
    assert isinstance(head, BlockHead)
    return head


def rms(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows * (rows.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotated(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    angles = positions[:, None] / THETA ** (torch.arange(0, DIM, 2) / DIM)
    cos, sin = (torch.cat([f(angles)] * 2, 1)[:, None] for f in (torch.cos, torch.sin))
    first, second = rows[..., : DIM // 2], rows[..., DIM // 2 :]
    return rows * cos + torch.cat([-second, first], -1) * sin


def plain_rows(held: Mapping[str, torch.Tensor], visible: torch.Tensor) -> torch.Tensor:
    """All of a block's rows: [block, hidden].  visible: bool[layers, block, context + block]."""
    context = rms(TAPS @ held["fc.weight"].T, held["hidden_norm.weight"])
    hidden = EMBEDDING[torch.tensor([TOKENS[0]] + [MASK] * (BLOCK - 1))]
    places = torch.arange(CONTEXT + BLOCK)
    for layer in range(LAYERS):
        of = {
            name.removeprefix(f"layers.{layer}."): tensor
            for name, tensor in held.items()
            if name.startswith(f"layers.{layer}.")
        }

        def projected(name: str, rows: torch.Tensor, of: dict[str, torch.Tensor] = of) -> Any:
            bias = of.get(f"self_attn.{name}_proj.bias", torch.zeros(1))
            return rows @ of[f"self_attn.{name}_proj.weight"].T + bias

        normed = rms(hidden, of["input_layernorm.weight"])
        both = torch.cat((context, normed))
        query = rms(projected("q", normed).view(BLOCK, HEADS, DIM), of["self_attn.q_norm.weight"])
        key = rms(projected("k", both).view(-1, KV_HEADS, DIM), of["self_attn.k_norm.weight"])
        value = projected("v", both).view(-1, KV_HEADS, DIM)
        query, key = rotated(query, places[CONTEXT:]), rotated(key, places)
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / DIM**0.5
        weights = scores.masked_fill(~visible[layer], -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, value).reshape(BLOCK, -1)
        hidden = hidden + projected("o", attended)
        inner = rms(hidden, of["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(inner @ of["mlp.gate_proj.weight"].T)
        up = inner @ of["mlp.up_proj.weight"].T
        hidden = hidden + (gate * up) @ of["mlp.down_proj.weight"].T
    return rms(hidden, held["norm.weight"])


def plain_bias(held: Mapping[str, torch.Tensor], kind: str, rows: torch.Tensor) -> torch.Tensor:
    """What the Markov head adds to the logits of rows whose tokens before are TOKENS."""
    state, biases = torch.zeros(RANK), []
    for row, token in zip(rows, TOKENS, strict=False):
        latent = held["markov_head.markov_w1.weight"][token]
        if kind == "gated":
            weight, bias = (held[f"markov_head.gate_proj.{part}"] for part in ("weight", "bias"))
            latent = latent * (weight @ torch.cat((row, latent)) + bias).sigmoid()
        if kind == "rnn":
            weight, bias = (held[f"markov_head.joint_proj.{part}"] for part in ("weight", "bias"))
            joint = weight @ torch.cat((state, latent, row)) + bias
            keep = joint[:RANK].sigmoid()
            state = keep * state + (1 - keep) * joint[RANK : 2 * RANK].tanh()
            latent = joint[2 * RANK :].tanh()
        biases.append(held["markov_head.markov_w2.weight"] @ latent)
    return torch.stack(biases)


def found_rows(head: BlockHead, visible: torch.Tensor) -> torch.Tensor:
    """The head's drafting rows of one block, its context kept as a cache would keep it."""
    kept = head.keys_values(head.fuse(TAPS), torch.arange(CONTEXT))

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys, values = torch.cat((kept[layer][0], key)), torch.cat((kept[layer][1], value))
        attended = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1),
            attn_mask=visible[layer], enable_gqa=True,
        )  # fmt: skip
        return attended.transpose(0, 1)

    return head(torch.tensor(TOKENS[:1]), torch.tensor([CONTEXT]), attend)[0]


ALL = torch.ones(LAYERS, BLOCK, CONTEXT + BLOCK, dtype=torch.bool)
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": DFLASH,
    "dflash with biases": {**DFLASH, "attention_bias": True},
    "dflash of speculators": SPECULATORS,
    "dspark": DSPARK,
    "dspark gated": {**DSPARK, "markov_head_type": "gated", "confidence_head_with_markov": False},
    "dspark rnn": {**DSPARK, "markov_head_type": "rnn", "enable_confidence_head": False},
    "dspark without a markov head": {
        **DSPARK, "markov_rank": 0, "confidence_head_with_markov": False,
    },
    "dspark of speculators": {
        **SPECULATORS, "speculators_model_type": "dspark", "sample_from_anchor": True,
        **SPARK_HEADS, "confidence_head_with_markov": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_and_confidence_equal_a_plain_implementation(variant: str, tmp_path: Path) -> None:
    config = VARIANTS[variant]
    held, head = tensors(config), loaded(tmp_path, config)
    rows = plain_rows(held, ALL)[BLOCK - head.spec.num_drafts :]
    output = held.get("lm_head.weight", OUTPUT)
    expected = rows @ output.T
    found = found_rows(head, ALL)
    torch.testing.assert_close(head.logits(found), expected, rtol=1e-4, atol=1e-4)
    if config.get("markov_rank"):
        assert head.markov_head is not None
        expected = expected + plain_bias(held, head.markov_head.spec.kind, rows)
        state, logits, surenesses = head.markov_head.start(1), [], []
        for row, token in zip(found, TOKENS, strict=False):
            before = head.markov_head.embedded(torch.tensor([token]))
            bias, state = head.markov_head(before, row[None], state)
            logits.append(head.logits(row) + bias[0])
            if head.confidence_head is not None:
                surenesses.append(head.confidence_head(row[None], before))
        torch.testing.assert_close(torch.stack(logits), expected, rtol=1e-4, atol=1e-4)
        if surenesses:
            shown = rows
            if config["confidence_head_with_markov"]:
                latents = held["markov_head.markov_w1.weight"][torch.tensor(TOKENS[: len(rows)])]
                shown = torch.cat((rows, latents), dim=1)
            sure = shown @ held["confidence_head.proj.weight"][0]
            sure = (sure + held["confidence_head.proj.bias"]).sigmoid()
            torch.testing.assert_close(torch.cat(surenesses), sure, rtol=1e-4, atol=1e-4)
    step = 1 if output is OUTPUT else 2
    assert torch.equal(head.token_map, step * torch.arange(len(output)))


def test_the_rotary_frequencies_are_not_rounded_with_the_weights(tmp_path: Path) -> None:
    head = loaded(tmp_path, DFLASH)
    frequencies = head.rotary.inv_freq.clone()
    narrow = head.to(torch.device("cpu"), torch.bfloat16)
    assert narrow.fc.weight.dtype is torch.bfloat16
    assert torch.equal(narrow.rotary.inv_freq, frequencies)


@pytest.mark.parametrize(
    ("config", "num_drafts"),
    [
        (DFLASH, BLOCK - 1),
        ({**DFLASH, "dflash_config": {**DFLASH["dflash_config"], "shift_label": True}}, BLOCK),
        (DSPARK, BLOCK),
        (SPECULATORS, BLOCK - 1),
        (VARIANTS["dspark of speculators"], BLOCK),
        ({**VARIANTS["dspark of speculators"], "sample_from_anchor": None}, BLOCK - 1),
        (
            {**VARIANTS["dspark of speculators"], "sample_from_anchor": None,
             "speculators_config": {"proposal_methods": [{"speculative_tokens": BLOCK}]}},
            BLOCK,
        ),
    ],
)  # fmt: skip
def test_whether_the_first_row_drafts_depends_on_the_form(
    config: dict[str, Any], num_drafts: int, tmp_path: Path
) -> None:
    head = loaded(tmp_path, config)
    assert head.spec.num_drafts == num_drafts
    assert len(found_rows(head, ALL)) == num_drafts


def test_authors_name_layers_by_their_outputs_and_speculators_counts_taps(tmp_path: Path) -> None:
    assert loaded(tmp_path, DFLASH).spec.taps == (2, 5, 7)
    assert loaded(tmp_path, DSPARK).spec.taps == (2, 5, 7)
    assert loaded(tmp_path, SPECULATORS).spec.taps == (2, 5, 7)


def test_taps_that_nobody_names_are_spread_over_the_target() -> None:
    assert default_taps(36, 5) == (2, 10, 18, 26, 34)
    assert default_taps(28, 1) == (15,)
    assert default_taps(9, 3) == (2, 5, 7)  # 3.5 is rounded to the even number, as the authors do


def test_keys_stand_in_dflash_config_too(tmp_path: Path) -> None:
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
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5,
             "is_causal": False},
            [(5, False), (None, False)],
        ),
        (
            {"dflash_config": {**DFLASH["dflash_config"], "use_swa": True, "swa_window_size": 6}},
            [(6, False), (6, False)],
        ),
    ],
)  # fmt: skip
def test_windows_and_causality_are_read(
    keys: dict[str, Any], sights: list[tuple[int | None, bool]], tmp_path: Path
) -> None:
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
            {}, "mask_token_id is 50, the embedding has 50 rows",
        ),
        (
            {**DFLASH, "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 4, 9]}},
            {}, r"taps layers \[10\]; the target has 9",
        ),
        (DFLASH, {"fc.weight": None}, "lacks fc.weight"),
        (DFLASH, {"layers.0.self_attn.sinks": torch.zeros(4)}, "nothing is known of layers.0"),
        (DFLASH, {"candidate_selector.x": torch.zeros(1)}, "DFlash-2 block drafter"),
        ({**DFLASH, "selector_rank": 4}, {}, "DFlash-2 block drafter"),
        ({**DFLASH, "architectures": ["DFlash2DraftModel"]}, {}, "DFlash-2 block drafter"),
        ({**SPECULATORS, "projector_type": "domino"}, {}, "Domino block drafter"),
        ({**DSPARK, "markov_head_type": "fir"}, {}, "markov_head_type is 'fir'; known: vanilla"),
        ({**DSPARK, "markov_rank": 0}, {}, "needs a markov_rank above 0"),
        ({**SPECULATORS, "draft_vocab_size": 20}, {"d2t": None}, "it has no d2t"),
        ({**DFLASH, "is_neox_style": False}, {}, "rotary embedding is interleaved"),
        (
            {**SPECULATORS, "aux_hidden_state_layer_ids": None}, {},
            "names no aux_hidden_state_layer_ids",
        ),
        (
            {**DFLASH, "layer_types": ["sliding_attention", "full_attention"]}, {},
            "sliding window of no stated size",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(
    config: dict[str, Any], change: dict[str, torch.Tensor | None], said: str, tmp_path: Path
) -> None:
    held = {**tensors(config), **change}
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path, config, kept)
