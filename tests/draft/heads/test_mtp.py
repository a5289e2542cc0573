"""Multi-token-prediction layers of each public layout, against a plain implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from cluster.draft.heads.checkpoint import TargetShape
from cluster.draft.heads.mtp import MtpHead, load
from cluster.errors import ConfigError
from tests.support.checkpoints import DEFAULT_VOCAB_SIZE, tiny_checkpoint
from tests.support.draft.heads import ByRows
from tests.support.draft.mtp import DIM, EXPERTS, FAMILIES, HEADS, LAYERS, SIZE, with_mtp
from tests.support.draft.plain import CAUSAL, attend
from tests.support.engine.driver import load_engine

TARGET = TargetShape(SIZE, DEFAULT_VOCAB_SIZE, LAYERS)
WEIGHTS = {
    name: torch.randn(DEFAULT_VOCAB_SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    for seed, name in enumerate(("embedding", "output"))
}
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2])
ROWS = len(TOKENS)
HIDDEN = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(5))
Held = Mapping[str, torch.Tensor]
EPS = {"glm4-moe": 1e-5, "deepseek-v3": 1e-6, "qwen3-next": 1e-6}


def loaded(folder: Path, target: TargetShape = TARGET) -> MtpHead:
    return load(folder, target, WEIGHTS.__getitem__)


def rotated(rows: torch.Tensor, size: int, *, by_pairs: bool = False) -> torch.Tensor:
    """The first `size` numbers of each head turned by its row's position.  by_pairs: neighbours
    are; else those of both halves."""
    angles = torch.arange(ROWS)[:, None] / 10000.0 ** (torch.arange(0, size, 2) / size)
    turned, rest = rows[..., :size], rows[..., size:]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if by_pairs else turned.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    # Which number goes where does not matter to products of queries and keys.
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def plain(held: Held, family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Its rows' outputs, and the logits of these."""
    is_qwen = family == "qwen3-next"
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.")
    if not is_qwen:
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "")
    of_embedding, of_hidden, joint, last, block = names

    def normed(name: str, rows: torch.Tensor) -> torch.Tensor:
        weight = held[f"{name}.weight"] + (1 if is_qwen else 0)
        eps = 1e-6 if name.endswith("a_layernorm") else EPS[family]
        return rows * (rows.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight

    def times(name: str, rows: torch.Tensor) -> torch.Tensor:
        return rows @ held[f"{name}.weight"].T + held.get(f"{name}.bias", torch.zeros(1))

    embedded = (WEIGHTS["embedding"] if is_qwen else held["embed_tokens.weight"])[TOKENS]
    if not is_qwen:
        embedded = embedded * (torch.arange(ROWS) > 0)[:, None]
    rows = times(
        joint, torch.cat((normed(of_embedding, embedded), normed(of_hidden, HIDDEN)), dim=1)
    )
    own = f"{block}self_attn."
    inner = normed(f"{block}input_layernorm", rows)
    if family == "deepseek-v3":
        query = times(
            f"{own}q_b_proj", normed(f"{own}q_a_layernorm", times(f"{own}q_a_proj", inner))
        )
        query = query.view(ROWS, HEADS, 16)
        latent, key_turned = times(f"{own}kv_a_proj_with_mqa", inner).split((12, 8), dim=-1)
        latent = times(f"{own}kv_b_proj", normed(f"{own}kv_a_layernorm", latent))
        key, value = latent.view(ROWS, HEADS, 18).split((8, 10), dim=-1)
        turned = rotated(key_turned[:, None], 8, by_pairs=True).expand(-1, HEADS, -1)
        key = torch.cat((turned, key), dim=-1)
        query = torch.cat((rotated(query[..., 8:], 8, by_pairs=True), query[..., :8]), dim=-1)
        attended = attend(query, key, value).reshape(ROWS, -1)
    else:
        query = times(f"{own}q_proj", inner).view(ROWS, HEADS, -1)
        gate = query[..., DIM:].reshape(ROWS, -1).sigmoid() if is_qwen else 1.0
        query = normed(f"{own}q_norm", query[..., :DIM])
        key = normed(f"{own}k_norm", times(f"{own}k_proj", inner).view(ROWS, -1, DIM))
        value = times(f"{own}v_proj", inner).view(ROWS, -1, DIM)
        size = DIM // 4 if is_qwen else DIM // 2
        attended = attend(rotated(query, size), rotated(key, size), value)
        attended = attended.reshape(ROWS, -1) * gate
    rows = rows + times(f"{own}o_proj", attended)
    inner = normed(f"{block}post_attention_layernorm", rows)

    def expert(name: str, row: torch.Tensor) -> torch.Tensor:
        gate = torch.nn.functional.silu(times(f"{name}.gate_proj", row))
        return times(f"{name}.down_proj", gate * times(f"{name}.up_proj", row))

    outputs = []
    for row in inner:
        scores = times(f"{block}mlp.gate", row)
        scores = scores.softmax(0) if is_qwen else scores.sigmoid()
        bias = held.get(f"{block}mlp.gate.e_score_correction_bias", torch.zeros(EXPERTS))
        chosen = (scores + bias).topk(2).indices.tolist()
        share = {"glm4-moe": 1.5, "deepseek-v3": 2.5, "qwen3-next": 1.0}[family]
        total = sum(
            scores[i] / scores[chosen].sum() * share * expert(f"{block}mlp.experts.{i}", row)
            for i in chosen
        )
        if is_qwen:
            sure = times(f"{block}mlp.shared_expert_gate", row).sigmoid()
            total = total + sure * expert(f"{block}mlp.shared_expert", row)
        else:
            total = total + expert(f"{block}mlp.shared_experts", row)
        outputs.append(total)
    rows = rows + torch.stack(outputs)
    output = WEIGHTS["output"] if is_qwen else held["shared_head.head.weight"]
    handed_on = normed(last, rows) if is_qwen else rows
    return handed_on, normed(last, rows) @ output.T


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_a_plain_implementation(family: str, tmp_path: Path) -> None:
    held = with_mtp(family, tmp_path)
    head = loaded(tmp_path)
    positions = torch.arange(ROWS)
    found = head(TOKENS, head.fuse(HIDDEN), positions, CAUSAL)
    handed_on, logits = plain(held, family)
    torch.testing.assert_close(head.handed_on(found), handed_on, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.logits(found), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_keys_and_values_kept_are_those_that_rows_attend_to(
    family: str, tmp_path: Path
) -> None:
    with_mtp(family, tmp_path)
    head, positions = loaded(tmp_path), torch.arange(ROWS)
    seen: list[tuple[torch.Tensor, ...]] = []

    def see(layer: int, *rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows[1:])
        return attend(*rows)

    head(TOKENS, HIDDEN, positions, ByRows(see))
    (held,) = head.keys_values(TOKENS, HIDDEN, positions, ByRows(see))
    for kept, used in zip(held, seen[0], strict=True):
        assert torch.equal(kept, used)


def test_experts_may_be_stored_together(tmp_path: Path) -> None:
    held = with_mtp("qwen3-next", tmp_path / "apart")
    names = [
        f"layers__0__mlp__experts__{i}__{part}_proj__weight"
        for i in range(EXPERTS)
        for part in ("gate", "up", "down")
    ]
    parts = {
        part: torch.stack(
            [held[f"layers.0.mlp.experts.{i}.{part}_proj.weight"] for i in range(EXPERTS)]
        )
        for part in ("gate", "up", "down")
    }
    together = {
        "layers__0__mlp__experts__gate_up_proj": torch.cat((parts["gate"], parts["up"]), dim=1),
        "layers__0__mlp__experts__down_proj": parts["down"],
    }
    with_mtp("qwen3-next", tmp_path / "together", **dict.fromkeys(names), **together)
    first, second = loaded(tmp_path / "apart"), loaded(tmp_path / "together")
    for (name, one), other in zip(
        first.state_dict().items(), second.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name


def test_a_checkpoint_may_leave_embedding_and_output_to_the_target(tmp_path: Path) -> None:
    with_mtp("glm4-moe", tmp_path, embed_tokens__weight=None, shared_head__head__weight=None)
    head = loaded(tmp_path)
    assert torch.equal(head.embed_tokens.weight, WEIGHTS["embedding"])
    assert torch.equal(head.lm_head.weight, WEIGHTS["output"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"eh_proj__weight": None}, r"prediction layer \(a tensor model.layers.3.eh_proj"),
        ({"hnorm__weight": None}, "it lacks hidden_norm.weight"),
        ({"mlp__experts__3__up_proj__weight": None}, "experts.gate_up_proj has the shape"),
        ({"mlp__gate__weight_scale_inv": torch.ones(1)}, "nothing is known of layers.0.mlp.gate"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    change: dict[str, torch.Tensor | None], said: str, tmp_path: Path
) -> None:
    with_mtp("glm4-moe", tmp_path, **change)
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path)


def test_the_layer_of_another_target_is_refused(tmp_path: Path) -> None:
    with_mtp("glm4-moe", tmp_path)
    with pytest.raises(ConfigError, match="its hidden_size is 48, the target's 32"):
        loaded(tmp_path, TargetShape(32, DEFAULT_VOCAB_SIZE, LAYERS))
    with pytest.raises(ConfigError, match="no multi-token-prediction layer"):
        loaded(tiny_checkpoint("llama", tmp_path / "llama"))


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("deepseek-v3", r"DeepseekV3ForCausalLM .* cannot be served: multi-head latent attention"),
        ("qwen3-next", r"Qwen3NextForCausalLM .* cannot be served: its layers of type linear_att"),
    ],
)
def test_a_target_that_is_not_served_is_refused_by_name(
    family: str, said: str, tmp_path: Path
) -> None:
    """Whatever its layer could draft."""
    with_mtp(family, tmp_path)
    with pytest.raises(ConfigError, match=said):
        load_engine(tmp_path)


@pytest.mark.parametrize("family", ["glm4-moe"])
def test_a_target_that_is_served_loads_with_the_layer_in_its_checkpoint(
    family: str, tmp_path: Path, checkpoint_factory: Callable[..., Path]
) -> None:
    with_mtp(family, tmp_path)
    plain_engine = load_engine(checkpoint_factory(family))
    engine = load_engine(tmp_path)
    assert len(engine.model.layers) == len(plain_engine.model.layers) == LAYERS


def test_what_routes_is_not_rounded_with_the_weights(tmp_path: Path) -> None:
    held = with_mtp("glm4-moe", tmp_path)
    narrow = loaded(tmp_path).to(torch.device("cpu"), torch.bfloat16)
    assert narrow.joint.weight.dtype is torch.bfloat16
    bias = held["mlp.gate.e_score_correction_bias"]
    assert torch.equal(narrow.layers[0].mlp.gate.e_score_correction_bias, bias)
