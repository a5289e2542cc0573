"""Multi-token-prediction layers, against a plain implementation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.draft.heads.checkpoint import HeadTarget
from cluster.draft.heads.load import load_draft_head
from cluster.draft.heads.mtp import MtpHead
from cluster.engine.device import convert
from tests.support.architectures import DEFAULT_VOCAB_SIZE
from tests.support.checkpoints import tiny_checkpoint
from tests.support.choices import by_day
from tests.support.draft.heads import ByRows
from tests.support.draft.mtp import DIM, EXPERTS, HEADS, LAYERS, SIZE, with_mtp
from tests.support.draft.plain import CAUSAL, Held, attend, projected, rms, rotated
from tests.support.engine.driver import load_engine
from tests.support.errors import config_error

WEIGHTS = {
    name: torch.randn(DEFAULT_VOCAB_SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    for seed, name in enumerate(("embedding", "output"))
}
TARGET = HeadTarget(SIZE, DEFAULT_VOCAB_SIZE, LAYERS, WEIGHTS.__getitem__)
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2])
ROWS = len(TOKENS)
PLACES = torch.arange(ROWS)
HIDDEN = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(5))
BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
PARTS = ("gate", "up", "down")
ARCHITECTURES = ("glm4-moe", "glm4-moe-lite", "qwen3-next", "qwen3.5", "qwen3.5-moe")


def loaded(folder: Path, target: HeadTarget = TARGET) -> MtpHead:
    return load_draft_head(folder, target, "mtp")


def turned(heads: torch.Tensor, weight: torch.Tensor, size: int) -> torch.Tensor:
    """Normed, and so many numbers of each head rotated."""
    first, rest = rms(heads, weight).split((size, DIM - size), dim=-1)
    return torch.cat((rotated(first, PLACES), rest), dim=-1)


def by_heads(held: Held, rows: torch.Tensor) -> torch.Tensor:
    """GLM-4.5: of each head half is rotated."""
    query, key, value = (projected(held, name, rows).view(ROWS, -1, DIM) for name in "qkv")
    query = turned(query, held["self_attn.q_norm.weight"], DIM // 2)
    key = turned(key, held["self_attn.k_norm.weight"], DIM // 2)
    return attend(query, key, value)


def by_latents(held: Held, rows: torch.Tensor) -> torch.Tensor:
    """GLM-4.7-Flash, as DeepSeek V3: keys of 12 numbers and values of 8 are made of a latent of 16,
    and all heads share the rotated 8 of a key."""

    def made(name: str, found: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed = rms(found, held[f"self_attn.{name}_a_layernorm.weight"])
        rows = normed @ held[f"self_attn.{name}_b_proj.weight"].T
        return rows.view(ROWS, HEADS, -1).split((12, 8), dim=2)

    both = rows @ held["self_attn.kv_a_proj_with_mqa.weight"].T
    query, turning = made("q", rows @ held["self_attn.q_a_proj.weight"].T)
    key, value = made("kv", both[:, :16])
    shared = rotated(both[:, None, 16:], PLACES).expand(-1, HEADS, -1)
    query = torch.cat((query, rotated(turning, PLACES)), dim=-1)
    return attend(query, torch.cat((key, shared), dim=-1), value)


def by_gates(held: Held, rows: torch.Tensor) -> torch.Tensor:
    """Qwen3-Next and 3.5: of each head a quarter is rotated, and what it attended to is multiplied
    by a gate, which stands behind its query."""
    query, gate = projected(held, "q", rows).view(ROWS, HEADS, 2 * DIM).chunk(2, dim=-1)
    key, value = (projected(held, name, rows).view(ROWS, -1, DIM) for name in "kv")
    query = turned(query, 1 + held["self_attn.q_norm.weight"], DIM // 4)
    key = turned(key, 1 + held["self_attn.k_norm.weight"], DIM // 4)
    return attend(query, key, value) * gate.sigmoid()


def plain(held: Held) -> tuple[torch.Tensor, torch.Tensor]:
    """What its rows hand on, and their logits."""
    is_apart = "embed_tokens.weight" not in held

    def normed(name: str, rows: torch.Tensor) -> torch.Tensor:
        return rms(rows, is_apart + held[f"{name}.weight"])

    def expert(name: str, row: torch.Tensor) -> torch.Tensor:
        gate, up, down = (held[f"mlp.{name}{part}_proj.weight"] for part in PARTS)
        return down @ (torch.nn.functional.silu(gate @ row) * (up @ row))

    def routed(row: torch.Tensor) -> torch.Tensor:
        scores = held["mlp.gate.weight"] @ row
        scores = scores.softmax(0) if is_apart else scores.sigmoid()
        bias = held.get("mlp.gate.e_score_correction_bias", torch.zeros(1))
        chosen = (scores + bias).topk(2).indices.tolist()
        scale = (1.0 if is_apart else 1.5) / scores[chosen].sum()
        found = sum(scale * scores[i] * expert(f"experts.{i}.", row) for i in chosen)
        if is_apart:
            share = (held["mlp.shared_expert_gate.weight"] @ row).sigmoid()
            return found + share * expert("shared_expert.", row)
        return found + expert("shared_experts.", row)

    embedding, output = WEIGHTS["embedding"], WEIGHTS["output"]
    embedded = held.get("embed_tokens.weight", embedding)[TOKENS]
    embedded = embedded * ((PLACES > 0) | is_apart)[:, None]
    both = torch.cat((normed("enorm", embedded), normed("hnorm", HIDDEN)), dim=1)
    rows = both @ held["eh_proj.weight"].T
    inner = normed("input_layernorm", rows)
    has_latents = "self_attn.kv_b_proj.weight" in held
    attended = by_gates if is_apart else by_latents if has_latents else by_heads
    rows = rows + projected(held, "o", attended(held, inner).flatten(1))
    inner = normed("post_attention_layernorm", rows)
    has_experts = "mlp.gate.weight" in held
    rows = rows + torch.stack([routed(row) if has_experts else expert("", row) for row in inner])
    found = normed("shared_head.norm", rows)
    return found if is_apart else rows, found @ held.get("shared_head.head.weight", output).T


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_a_plain_implementation(architecture: str, tmp_path: Path):
    held = with_mtp(tmp_path, architecture)
    head = loaded(tmp_path)
    found = head(TOKENS, head.fuse(HIDDEN), PLACES, CAUSAL)
    handed_on, logits = plain(held)
    torch.testing.assert_close(head.handed_on(found), handed_on, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.logits(found), logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("architecture", by_day(ARCHITECTURES[1:3], ARCHITECTURES))
def test_the_keys_and_values_kept_are_those_that_rows_attend_to(architecture: str, tmp_path: Path):
    with_mtp(tmp_path, architecture)
    head = loaded(tmp_path)
    seen = []

    def see(layer: int, *rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows[1:])
        return attend(*rows)

    head(TOKENS, HIDDEN, PLACES, ByRows(see))
    (held,) = head.keys_values(TOKENS, HIDDEN, PLACES, ByRows(see))
    for kept, used in zip(held, seen[0], strict=True):
        assert torch.equal(kept, used)


def test_experts_may_be_stored_together(tmp_path: Path):
    held = with_mtp(tmp_path / "apart")
    names = [[f"mlp.experts.{i}.{part}_proj.weight" for i in range(EXPERTS)] for part in PARTS]
    gate, up, down = (torch.stack([held[name] for name in each]) for each in names)
    change = {
        "mlp.experts.gate_up_proj": torch.cat((gate, up), dim=1),
        "mlp.experts.down_proj": down,
        **{name: None for each in names for name in each},
    }
    with_mtp(tmp_path / "together", **change)
    first, second = (loaded(tmp_path / name).state_dict() for name in ("apart", "together"))
    assert first.keys() == second.keys()
    assert all(torch.equal(each, second[name]) for name, each in first.items())


def test_a_checkpoint_may_leave_embedding_and_output_to_the_target(tmp_path: Path):
    with_mtp(tmp_path, **dict.fromkeys(("embed_tokens.weight", "shared_head.head.weight")))
    head = loaded(tmp_path)
    assert torch.equal(head.embed_tokens.weight, WEIGHTS["embedding"])
    assert torch.equal(head.lm_head.weight, WEIGHTS["output"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"eh_proj.weight": None}, r"prediction layer \(a tensor model.layers.3.eh_proj"),
        ({"hnorm.weight": None}, "it lacks hidden_norm.weight"),
        ({"mlp.experts.3.up_proj.weight": None}, "experts.gate_up_proj has the shape"),
        ({"mlp.gate.weight_scale_inv": torch.ones(1)}, "nothing is known of layers.0.mlp.gate"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    change: dict[str, torch.Tensor | None], said: str, tmp_path: Path
):
    with_mtp(tmp_path, **change)
    with config_error(said):
        loaded(tmp_path)


def test_of_several_layers_apart_none_is_read(tmp_path: Path):
    with_mtp(tmp_path, "qwen3.5")
    path, name = tmp_path / "model.safetensors", "layers.1.input_layernorm.weight"
    save_file(load_file(path) | {f"mtp.{name}": torch.ones(SIZE)}, path, {"format": "pt"})
    with config_error(f"nothing is known of {name}"):
        loaded(tmp_path)


def test_the_layer_of_another_target_is_refused(tmp_path: Path):
    with_mtp(tmp_path)
    with config_error("its hidden_size is 48, the target's 32"):
        loaded(tmp_path, replace(TARGET, hidden_size=32))
    with config_error("no multi-token-prediction layer"):
        loaded(tiny_checkpoint("llama", tmp_path / "llama"))


def test_a_target_loads_with_the_layer_in_its_checkpoint(tmp_path: Path):
    with_mtp(tmp_path)
    assert len(load_engine(tmp_path).model.layers) == LAYERS


def test_what_routes_is_not_rounded_with_the_weights(tmp_path: Path):
    held = with_mtp(tmp_path)
    narrow = loaded(tmp_path)
    convert(narrow, torch.bfloat16)
    assert narrow.joint.weight.dtype is torch.bfloat16
    bias = held["mlp.gate.e_score_correction_bias"]
    assert torch.equal(narrow.layers[0].mlp.gate.e_score_correction_bias, bias)


def test_of_images_and_text_the_text_says_how_and_the_whole_how_it_is_stored(
    tmp_path: Path,
):
    change = {
        "mlp.down_proj.weight": torch.ones(SIZE, 96).to(torch.float8_e4m3fn),
        "mlp.down_proj.weight_scale_inv": torch.full((3, 6), 0.5),
    }
    with_mtp(tmp_path, "qwen3.5", **change)
    config = tmp_path / "config.json"
    whole = {"model_type": "qwen3_5", "text_config": json.loads(config.read_text("utf-8"))}
    config.write_text(json.dumps(whole | BLOCKS))
    assert torch.equal(
        loaded(tmp_path).layers[0].mlp.down_proj.weight, torch.full((SIZE, 96), 0.5).bfloat16()
    )
    whole["text_config"]["mtp_use_dedicated_embeddings"] = True
    config.write_text(json.dumps(whole))
    with config_error("it says mtp_use_dedicated_embeddings, and how"):
        loaded(tmp_path)


def test_blocks_of_eight_bits_are_widened(tmp_path: Path):
    """With a scale for each block, as DeepSeek V3 stores them."""
    names = ("self_attn.q_b_proj.weight", "mlp.experts.1.down_proj.weight", "eh_proj.weight")
    held = with_mtp(tmp_path, "deepseek-v3")
    change = {}
    for name in names:
        change[name] = held[name].to(torch.float8_e4m3fn)
        rows, columns = (-(-size // 16) for size in held[name].shape)
        change[f"{name}_scale_inv"] = torch.linspace(1, 2, rows * columns).view(rows, columns)
    with_mtp(tmp_path, "deepseek-v3", **change)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | BLOCKS))
    found = loaded(tmp_path)
    attention, mixture = found.layers[0].self_attn, found.layers[0].mlp
    weights = attention.q_b_proj.weight, mixture.experts.down_proj[1], found.joint.weight
    for name, weight in zip(names, weights, strict=True):
        rows, columns = weight.shape
        scales = change[f"{name}_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
        expected = change[name].float() * scales[:rows, :columns]
        assert torch.equal(weight, expected.bfloat16())
