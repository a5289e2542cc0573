"""DFlash, DFlash-2 and DSpark, in every variant, against plain code written from the formulas."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.draft.heads.block import BlockHead
from tests.support.draft.block_forms import (
    BLOCK,
    CONTEXT,
    DFLASH,
    DFLASH_2,
    DIM,
    DSPARK,
    EMBEDDING,
    HIDDEN,
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


def convolved(
    rows: torch.Tensor, said: torch.Tensor, of: Held, name: str, part: int
) -> torch.Tensor:
    """The sum over taps t of (base[t, c] + said[i, t, group of c]) * rows[i - t, c].

    part: of the convolutions before and behind."""
    base = of[f"{name}.base_kernel"][part]
    kernels = (of[f"{name}.kernel_projection.weight"] @ said.T).T.view(BLOCK, 2, len(base), -1)
    found = torch.zeros_like(rows)
    for row in range(BLOCK):
        for tap in range(min(row + 1, len(base))):
            own = kernels[row, part, tap].repeat_interleave(HIDDEN // kernels.shape[-1])
            found[row] += (base[tap] + own) * rows[row - tap]
    return found


def convolved_layer(
    of: Held, hidden: torch.Tensor, attended: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """A layer of DFlash-2.  attended: what its heads find for convolved rows, side by side."""
    normed = rms(hidden, of["input_layernorm.weight"])
    found = projected(of, "o", attended(convolved(normed, normed, of, "attention_conv", 0)))
    hidden = hidden + convolved(found, normed, of, "attention_conv", 1)
    normed = rms(hidden, of["post_attention_layernorm.weight"])
    inner = convolved(normed, normed, of, "mlp_conv", 0)
    gate = torch.nn.functional.silu(inner @ of["mlp.gate_proj.weight"].T)
    found = (gate * (inner @ of["mlp.up_proj.weight"].T)) @ of["mlp.down_proj.weight"].T
    return hidden + convolved(found, normed, of, "mlp_conv", 1)


def plain_rows(held: Held, scale: float) -> torch.Tensor:
    """All of a block's rows: [block, hidden].  scale: of the embeddings."""
    context = rms(TAPS @ held["fc.weight"].T, held["hidden_norm.weight"])
    hidden = EMBEDDING[torch.tensor([TOKENS[0]] + [MASK] * (BLOCK - 1))] * scale
    places = torch.arange(CONTEXT + BLOCK)
    for layer in range(LAYERS):
        of = part_of(held, f"layers.{layer}.")

        def attended(given: torch.Tensor, of: Held = of) -> torch.Tensor:
            both = torch.cat((context, given))
            query, key, value = (
                projected(of, name, rows).view(len(rows), -1, DIM)
                for name, rows in (("q", given), ("k", both), ("v", both))
            )
            query, key = (
                rms(rows, of[f"self_attn.{name}_norm.weight"])
                for name, rows in (("q", query), ("k", key))
            )
            query, key = rotated(query, places[CONTEXT:], THETA), rotated(key, places, THETA)
            return attend(query, key, value, ALL).flatten(1)

        if "attention_conv.base_kernel" in of:
            hidden = convolved_layer(of, hidden, attended)
        else:
            normed = rms(hidden, of["input_layernorm.weight"])
            hidden = behind_attention(of, hidden, attended(normed))
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
def test_logits_and_confidence_equal_a_plain_implementation(variant: str, tmp_path: Path):
    config = VARIANTS[variant]
    held, head = tensors(config), loaded(tmp_path, config)
    said = config.get("dflash_config", {})
    rows = plain_rows(held, said.get("input_embedding_scale", 1.0))
    rows = rows[BLOCK - head.spec.num_drafts :]
    output = held.get("lm_head.weight", OUTPUT)
    expected = (rows @ output.T) * said.get("output_multiplier", 1.0)
    if cap := said.get("final_logit_softcapping"):
        expected = cap * (expected / cap).tanh()
    found = found_rows(head)
    torch.testing.assert_close(head.logits(found), expected, rtol=1e-4, atol=1e-4)
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


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("dflash-2")])
@torch.no_grad()
def test_the_selector_scores_the_best_tokens_by_the_one_before(variant: str, tmp_path: Path):
    held, head = tensors(VARIANTS[variant]), loaded(tmp_path, VARIANTS[variant])
    rows = found_rows(head)
    logits = head.logits(rows)
    before = torch.tensor(TOKENS[: len(rows)])
    found = head.candidate_selector(logits, head.token_map, rows, before)
    books = [held[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor")]
    project = held["candidate_selector.hidden_projection.weight"]
    for row, own, token, scores in zip(rows, logits, before, found, strict=True):
        best = own.argsort(descending=True)[:5].tolist()
        assert scores.isfinite().nonzero()[:, 0].tolist() == sorted(best)
        for column in best:
            follower = books[1][head.token_map[column]]
            expected = own[column] + (books[0][token] * (project @ row) * follower).sum()
            torch.testing.assert_close(scores[column], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "num_drafts"),
    [
        (DFLASH, BLOCK - 1),
        ({**DFLASH, "dflash_config": {**DFLASH["dflash_config"], "shift_label": True}}, BLOCK),
        (DFLASH_2, BLOCK - 1),
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
):
    head = loaded(tmp_path, config)
    assert head.spec.num_drafts == num_drafts
    assert len(found_rows(head)) == num_drafts
