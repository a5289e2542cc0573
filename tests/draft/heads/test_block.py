"""DFlash, DFlash-2 and DSpark, in every variant, against plain code written from the formulas; and
what their files say is read, or refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.draft.heads.block import BlockHead, default_taps
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
    SECOND,
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
    behind,
    behind_attention,
    part_of,
    projected,
    rms,
    rotated,
)
from tests.support.errors import config_error

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
    last, place = torch.tensor(TOKENS[:1]), torch.tensor([CONTEXT])
    return head.block(last, torch.zeros(1, HIDDEN), place, BLOCK, behind(kept, head.sights))[0]


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


@pytest.mark.parametrize("config", [DFLASH, DSPARK, SPECULATORS])
def test_authors_name_layers_by_their_outputs_and_speculators_counts_taps(
    config: dict[str, Any], tmp_path: Path
):
    assert loaded(tmp_path, config).spec.taps == (2, 5, 7)


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
    with config_error(said):
        loaded(tmp_path, config, change)
