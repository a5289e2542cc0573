"""EAGLE-3 and P-EAGLE heads, in every variant, against a plain implementation written from the
papers, and the traps of their folders."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.draft.heads.checkpoint import HeadTarget
from cluster.draft.heads.eagle3 import DEFAULT_DRAFTS, Eagle3Head
from cluster.draft.heads.load import load_draft_head
from tests.support.draft.heads import eagle3_tensors, written
from tests.support.draft.plain import (
    CAUSAL,
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

HIDDEN, HEADS, KV_HEADS, DIM, INNER = 32, 4, 2, 8, 48
VOCAB, DRAFT_VOCAB, LAYERS, ROWS = 50, 20, 9, 7
NUM_LAYERS, MASK_TOKEN, NUM_DRAFTS = 3, 7, 4  # of a P-EAGLE head
LAYER = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}
EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
TARGET = HeadTarget(HIDDEN, VOCAB, LAYERS, {"embedding": EMBEDDING}.__getitem__)
AUTHORS = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": DRAFT_VOCAB,
    **LAYER,
}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9",
    "transformer_layer_config": LAYER,
    "draft_vocab_size": DRAFT_VOCAB,
}
SEVERAL = {"num_hidden_layers": NUM_LAYERS, "attention_bias": True}
PARALLEL = {**AUTHORS, **SEVERAL, "ptd_token_id": MASK_TOKEN}
PARALLEL_SPECULATORS = {
    **SPECULATORS,
    "speculators_model_type": "peagle",
    "mask_token_id": MASK_TOKEN,
    "transformer_layer_config": {**LAYER, **SEVERAL},
    "speculators_config": {
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": NUM_DRAFTS}],
        "default_proposal_method": "greedy",
    },
}


def is_parallel(config: Mapping[str, Any]) -> bool:
    return config.get("transformer_layer_config", config).get("attention_bias", False)


def tensors(config: Mapping[str, Any]) -> Held:
    """Random ones, as the configuration wants them; a parallel head has several layers with biases,
    and the mask row is written in two ways."""
    is_authors, parallel = "transformer_layer_config" not in config, is_parallel(config)
    held = eagle3_tensors(
        HIDDEN,
        INNER,
        DRAFT_VOCAB,
        "midlayer." if is_authors else "layers.0.",
        num_layers=NUM_LAYERS if parallel else 1,
        has_bias=parallel,
    )
    # Target id = 2 i.
    held |= {"d2t": torch.arange(DRAFT_VOCAB), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    if parallel:
        mask = torch.randn(1, 3 * HIDDEN, generator=torch.Generator().manual_seed(6))
        held["mask_hidden"] = mask if is_authors else mask[None]
    return held


def loaded(
    folder: Path, config: Mapping[str, Any], change: Mapping[str, torch.Tensor | None] | None = None
) -> Eagle3Head:
    """change: tensors in place of the configuration's, None = left out."""
    held = {**tensors(config), **(change or {})}
    return load_draft_head(written(folder, config, held), TARGET)


TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2])
TAPS = torch.randn(ROWS, 3 * HIDDEN, generator=torch.Generator().manual_seed(3))


def plain_logits(
    held: Held, config: Mapping[str, Any], ids: torch.Tensor, taps: torch.Tensor
) -> torch.Tensor:
    """Of all rows, by all layers that are there."""
    if config.get("norm_before_fc"):
        taps = rms(taps, held["input_norm.weight"])
    if config.get("fc_norm"):
        parts = enumerate(taps.split(HIDDEN, dim=1))
        taps = torch.cat([rms(part, held[f"fc_norm.{i}.weight"]) for i, part in parts], dim=1)
    hidden, places = taps @ held["fc.weight"].T, torch.arange(len(ids))
    names = {name.replace("midlayer.", "layers.0."): each for name, each in held.items()}
    for layer in range(NUM_LAYERS):
        of = part_of(names, f"layers.{layer}.")
        if "mlp.up_proj.weight" not in of:
            break
        residual, given = hidden, rms(hidden, of["input_layernorm.weight"])
        if layer == 0:
            normed = rms(hidden, of["hidden_norm.weight"])
            given = torch.cat([rms(EMBEDDING[ids], of["input_layernorm.weight"]), normed], dim=1)
            residual = normed if config.get("norm_before_residual") else hidden
        query, key, value = (
            projected(of, name, given).view(len(ids), -1, DIM) for name in ("q", "k", "v")
        )
        attended = attend(rotated(query, places), rotated(key, places), value)
        hidden = behind_attention(of, residual, attended)
    return rms(hidden, held["norm.weight"]) @ held["lm_head.weight"].T


@torch.no_grad()
def check_logits(head: Eagle3Head, held: Held, config: Mapping[str, Any]) -> torch.Tensor:
    """Compare them with a plain implementation's; returns what the layers gave."""
    hidden = head(TOKENS, head.fuse(TAPS), torch.arange(ROWS), CAUSAL)
    expected = plain_logits(held, config, TOKENS, TAPS)
    torch.testing.assert_close(head.logits(hidden), expected, rtol=1e-4, atol=1e-4)
    return hidden


@torch.no_grad()
def check_drafts(head: Eagle3Head, held: Held, config: Mapping[str, Any]) -> None:
    """What a parallel head drafts behind a text of ROWS rows, whose last one is the first of the
    pass."""
    fused, before = head.fuse(TAPS), slice(0, ROWS - 1)
    kept = head.keys_values(TOKENS[before], fused[before], torch.arange(ROWS - 1), CAUSAL)
    place, plan = torch.tensor([ROWS - 1]), behind(kept, head.sights)
    rows = head.block(TOKENS[-1:], fused[-1:], place, NUM_DRAFTS, plan)
    ids = torch.cat((TOKENS, torch.full((NUM_DRAFTS - 1,), MASK_TOKEN)))
    taps = torch.cat((TAPS, held["mask_hidden"].flatten().expand(NUM_DRAFTS - 1, -1)))
    expected = plain_logits(held, config, ids, taps)[ROWS - 1 :]
    torch.testing.assert_close(head.lm_head(rows[0]), expected, rtol=1e-4, atol=1e-4)


def norms(*names: str) -> Held:
    sizes = {"input_norm.weight": 3 * HIDDEN}
    generator = torch.Generator().manual_seed(4)
    return {
        name: 1 + 0.3 * torch.randn(sizes.get(name, HIDDEN), generator=generator) for name in names
    }


PER_TAP = ("fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight")
VARIANTS = [
    ({}, ()),
    ({"norm_before_residual": True}, ()),
    ({"fc_norm": True}, PER_TAP),
    ({"norm_before_fc": True, "norm_output": True}, ("input_norm.weight",)),
]


@pytest.mark.parametrize("form", [AUTHORS, SPECULATORS, PARALLEL, PARALLEL_SPECULATORS])
@pytest.mark.parametrize(("keys", "extra"), VARIANTS)
def test_what_it_computes_equals_a_plain_implementation(
    form: dict[str, Any], keys: dict[str, bool], extra: tuple[str, ...], tmp_path: Path
):
    config = form | keys
    held = tensors(config) | norms(*extra)
    head = loaded(tmp_path, config, held)
    (check_drafts if is_parallel(config) else check_logits)(head, held, config)
    assert torch.equal(head.token_map, 2 * torch.arange(DRAFT_VOCAB))


# EAGLE-3.1 as its trainers write it: SpecForge's configs/qwen3-30B-A3B-eagle3.1.json, sizes aside,
# and the layers to tap as DeepSeek-V4-Flash-EAGLE3.1 names them.  NeMo's names begin with "model.".
PUBLISHED = AUTHORS | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 7], "use_aux_hidden_state": True},
    "fc_norm": True,
    "head_dim": DIM,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_window_layers": 48,
    "norm_output": True,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.2",
    "use_cache": True,
    "use_sliding_window": False,
}


@pytest.mark.parametrize("prefix", ["", "model."])
def test_eagle_3_1_is_read_as_published(prefix: str, tmp_path: Path):
    held = tensors(PUBLISHED) | norms(*PER_TAP)
    stored = {
        name if name in ("lm_head.weight", "d2t", "t2d") else prefix + name: each
        for name, each in held.items()
    }
    head = load_draft_head(written(tmp_path, PUBLISHED, stored), TARGET)
    assert head.spec.taps == (1, 4, 7)
    hidden = check_logits(head, held, PUBLISHED)
    with torch.no_grad():
        normed = rms(hidden, held["norm.weight"])
        torch.testing.assert_close(head.handed_on(hidden), normed, rtol=1e-4, atol=1e-4)


def test_norms_and_taps_are_read_from_eagle_config_too(tmp_path: Path):
    """Norms as NVIDIA's heads of gpt-oss have them; taps that nobody names are the inputs of three
    layers."""
    spec = loaded(tmp_path, AUTHORS).spec
    assert (spec.taps, spec.norms_all_taps) == ((2, 4, 6), False)
    own = {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 8]}
    named = loaded(tmp_path, {**AUTHORS, "eagle_config": own}, norms("input_norm.weight")).spec
    assert (named.taps, named.norms_all_taps) == ((1, 3, 8), True)


def test_equal_vocabularies_need_no_map(tmp_path: Path):
    whole = {"lm_head.weight": torch.randn(VOCAB, HIDDEN), "d2t": None, "t2d": None}
    config = {key: value for key, value in AUTHORS.items() if key != "draft_vocab_size"}
    assert torch.equal(loaded(tmp_path, config, whole).token_map, torch.arange(VOCAB))


def test_an_embedding_of_its_own_is_used(tmp_path: Path):
    own = torch.randn(VOCAB, HIDDEN)
    head = loaded(tmp_path, AUTHORS, {"embed_tokens.weight": own})
    assert torch.equal(head.embed_tokens.weight, own)


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id", "mask_token_id"])
def test_the_mask_token_is_found_under_every_name(key: str, tmp_path: Path):
    keys = {"ptd_token_id": None, "parallel_drafting": True, key: 9}
    assert loaded(tmp_path, PARALLEL | keys).spec.mask_token_id == 9


@pytest.mark.parametrize(
    ("config", "count"), [(PARALLEL_SPECULATORS, NUM_DRAFTS), (PARALLEL, DEFAULT_DRAFTS)]
)
def test_the_folder_says_how_many_tokens_a_pass_drafts(
    config: dict[str, Any], count: int, tmp_path: Path
):
    assert loaded(tmp_path, config).spec.num_drafts == count


def test_a_norm_that_deeper_layers_do_not_use_may_be_there(tmp_path: Path):
    held = tensors(PARALLEL) | {"layers.1.hidden_norm.weight": torch.ones(HIDDEN)}
    check_drafts(loaded(tmp_path, PARALLEL, held), held, PARALLEL)


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        ({**AUTHORS, "target_hidden_size": 16}, {}, "target_hidden_size is 16, the target's 32"),
        ({**AUTHORS, "vocab_size": 60}, {}, "vocab_size is 60, the target's 50"),
        (AUTHORS, {"fc.weight": None}, "lacks fc.weight"),
        (AUTHORS, {"mask_hidden": torch.zeros(1)}, "nothing is known of mask_hidden"),
        ({**AUTHORS, "layer_types": ["sliding_attention"]}, {}, "attend in a sliding window"),
        (AUTHORS, {"surplus.weight": torch.zeros(1)}, "nothing is known of surplus.weight"),
        (AUTHORS, {"d2t": None}, "it has no d2t"),
        (AUTHORS, {"d2t": torch.full((DRAFT_VOCAB,), 40)}, "d2t does not lead"),
        (AUTHORS, {"norm.weight": torch.zeros(3)}, r"norm.weight has the shape \[3\]"),
        (
            {**AUTHORS, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 12]}},
            {},
            r"taps layers \[12\]; the target has 9",
        ),
        ({**AUTHORS, "eagle_config": {"use_aux_hidden_state": False}}, {}, "last layer alone"),
        ({**AUTHORS, "eagle_config": None}, {}, "eagle_config is None"),
        ({**AUTHORS, "eagle_config": [2, 4, 6]}, {}, r"eagle_config is \[2, 4, 6\]"),
        (
            {**AUTHORS, "eagle_config": {"eagle_aux_hidden_state_layer_ids": []}},
            {},
            r"fc.weight has the shape",
        ),
        ({"architectures": ["JetSpecModel"]}, {}, "JetSpec block drafter"),
        (
            {"architectures": ["LlamaForCausalLMEagle4"]},
            {},
            "an EAGLE-4 head, of which neither the format .* draft with an EAGLE-3 head",
        ),
        (
            {**AUTHORS, "architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 8},
            {},
            r"multi-head latent attention \(MLA\), which is not served",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, {}, "no draft head that we know"),
        (
            {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1},
            {},
            "EAGLE heads of the first and second kind",
        ),
        ({"architectures": ["EagleLlamaForCausalLM"]}, {}, "EAGLE head of the first or second"),
        ({"speculators_model_type": "mtp"}, {}, "multi-token prediction"),
        (
            {**PARALLEL, "ptd_token_id": None, "parallel_drafting": True},
            {},
            r"names no mask token \(pard_token, ptd_token_id, mask_token_id\)",
        ),
        ({**PARALLEL, "ptd_token_id": VOCAB}, {}, "mask token 50 is none of the target's 50"),
        ({**PARALLEL, "num_hidden_layers": 2}, {}, r"nothing is known of layers\.2"),
        ({**PARALLEL, "num_hidden_layers": 4}, {}, r"it lacks layers\.3"),
        (PARALLEL, {"mask_hidden": None}, "it lacks mask_hidden"),
        (PARALLEL, {"mask_hidden": torch.zeros(HIDDEN)}, r"mask_hidden has the shape \[32\]"),
        (
            {**PARALLEL, "layer_types": ["full_attention", "sliding_attention"]},
            {},
            "sliding window",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    config: dict[str, Any], change: dict[str, torch.Tensor | None], said: str, tmp_path: Path
):
    with config_error(said):
        loaded(tmp_path, config, change)


def test_a_pickled_object_is_never_loaded(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(AUTHORS))
    torch.save({"fc.weight": Path("/")}, tmp_path / "pytorch_model.bin")
    with config_error("more than tensors"):
        load_draft_head(tmp_path, TARGET)
