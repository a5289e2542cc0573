"""DFlash and DSpark, in every variant, against a plain implementation written from the formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.draft.heads.block import BlockHead
from tests.support.draft.block_forms import (
    BLOCK,
    CONTEXT,
    DFLASH,
    DIM,
    DSPARK,
    EMBEDDING,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MASK,
    OUTPUT,
    RANK,
    SPECULATORS,
    TAPS,
    THETA,
    TOKENS,
    VARIANTS,
    loaded,
    tensors,
)
from tests.support.draft.heads import ByRows
from tests.support.draft.plain import (
    Held,
    attend,
    behind_attention,
    part_of,
    projected,
    rms,
    rotated,
)

ALL = torch.ones(BLOCK, CONTEXT + BLOCK, dtype=torch.bool)


def plain_rows(held: Held) -> torch.Tensor:
    """All of a block's rows: [block, hidden]."""
    context = rms(TAPS @ held["fc.weight"].T, held["hidden_norm.weight"])
    hidden = EMBEDDING[torch.tensor([TOKENS[0]] + [MASK] * (BLOCK - 1))]
    places = torch.arange(CONTEXT + BLOCK)
    for layer in range(LAYERS):
        of = part_of(held, f"layers.{layer}.")
        normed = rms(hidden, of["input_layernorm.weight"])
        both = torch.cat((context, normed))
        query = rms(
            projected(of, "q", normed).view(BLOCK, HEADS, DIM), of["self_attn.q_norm.weight"]
        )
        key = rms(projected(of, "k", both).view(-1, KV_HEADS, DIM), of["self_attn.k_norm.weight"])
        value = projected(of, "v", both).view(-1, KV_HEADS, DIM)
        query, key = rotated(query, places[CONTEXT:], THETA), rotated(key, places, THETA)
        hidden = behind_attention(of, hidden, attend(query, key, value, ALL))
    return rms(hidden, held["norm.weight"])


def plain_bias(held: Held, kind: str, rows: torch.Tensor) -> torch.Tensor:
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


def found_rows(head: BlockHead) -> torch.Tensor:
    """The head's drafting rows of one block, its context kept as a cache would keep it."""
    places, none = torch.arange(CONTEXT), ByRows(lambda layer, *rows: rows[0])
    kept = head.keys_values(places, head.fuse(TAPS), places, none)

    def see(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys, values = torch.cat((kept[layer][0], key)), torch.cat((kept[layer][1], value))
        return attend(query, keys, values, ALL)

    last, place = torch.tensor(TOKENS[:1]), torch.tensor([CONTEXT])
    return head.block(last, torch.zeros(1, HIDDEN), place, BLOCK, ByRows(see))[0]


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_and_confidence_equal_a_plain_implementation(variant: str, tmp_path: Path) -> None:
    config = VARIANTS[variant]
    held, head = tensors(config), loaded(tmp_path, config)
    rows = plain_rows(held)[BLOCK - head.spec.num_drafts :]
    output = held.get("lm_head.weight", OUTPUT)
    expected = rows @ output.T
    found = found_rows(head)
    torch.testing.assert_close(head.lm_head(found), expected, rtol=1e-4, atol=1e-4)
    if config.get("markov_rank"):
        expected = expected + plain_bias(held, head.markov_head.spec.kind, rows)
        state, logits, surenesses = head.markov_head.start(1), [], []
        for row, token in zip(found, TOKENS, strict=False):
            before = head.markov_head.embedded(torch.tensor([token]))
            bias, state = head.markov_head(before, row[None], state)
            logits.append(head.lm_head(row) + bias[0])
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
            {
                **VARIANTS["dspark of speculators"],
                "sample_from_anchor": None,
                "speculators_config": {"proposal_methods": [{"speculative_tokens": BLOCK}]},
            },
            BLOCK,
        ),
    ],
)
def test_whether_the_first_row_drafts_depends_on_the_form(
    config: dict[str, Any], num_drafts: int, tmp_path: Path
) -> None:
    head = loaded(tmp_path, config)
    assert head.spec.num_drafts == num_drafts
    assert len(found_rows(head)) == num_drafts
