"""Multi-token-prediction layers, against a plain implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.draft.heads.checkpoint import TargetShape
from cluster.draft.heads.mtp import MtpHead, load
from cluster.engine.device import convert
from cluster.errors import ConfigError
from tests.support.architectures import DEFAULT_VOCAB_SIZE
from tests.support.checkpoints import tiny_checkpoint
from tests.support.draft.heads import ByRows
from tests.support.draft.mtp import DIM, EXPERTS, LAYERS, SIZE, with_mtp
from tests.support.draft.plain import CAUSAL, Held, attend, projected, rms, rotated
from tests.support.engine.driver import load_engine

TARGET = TargetShape(SIZE, DEFAULT_VOCAB_SIZE, LAYERS)
WEIGHTS = {
    name: torch.randn(DEFAULT_VOCAB_SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    for seed, name in enumerate(("embedding", "output"))
}
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2])
ROWS = len(TOKENS)
PLACES = torch.arange(ROWS)
HIDDEN = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(5))
PARTS = ("gate", "up", "down")


def loaded(folder: Path, target: TargetShape = TARGET) -> MtpHead:
    return load(folder, target, WEIGHTS.__getitem__)


def plain(held: Held) -> tuple[torch.Tensor, torch.Tensor]:
    """Its rows' outputs, and the logits of these."""

    def normed(name: str, rows: torch.Tensor) -> torch.Tensor:
        return rms(rows, held[f"{name}.weight"])

    def turned(heads: torch.Tensor) -> torch.Tensor:
        """Half of each head."""
        first, rest = heads.chunk(2, dim=-1)
        return torch.cat((rotated(first, PLACES), rest), dim=-1)

    def expert(name: str, row: torch.Tensor) -> torch.Tensor:
        gate, up, down = (held[f"mlp.{name}.{part}_proj.weight"] for part in PARTS)
        return down @ (torch.nn.functional.silu(gate @ row) * (up @ row))

    embedded = held["embed_tokens.weight"][TOKENS] * (PLACES > 0)[:, None]
    both = torch.cat((normed("enorm", embedded), normed("hnorm", HIDDEN)), dim=1)
    rows = both @ held["eh_proj.weight"].T
    inner = normed("input_layernorm", rows)
    query, key, value = (projected(held, name, inner).view(ROWS, -1, DIM) for name in "qkv")
    query, key = normed("self_attn.q_norm", query), normed("self_attn.k_norm", key)
    rows = rows + projected(held, "o", attend(turned(query), turned(key), value).flatten(1))
    outputs = []
    for row in normed("post_attention_layernorm", rows):
        scores = (held["mlp.gate.weight"] @ row).sigmoid()
        chosen = (scores + held["mlp.gate.e_score_correction_bias"]).topk(2).indices.tolist()
        shares = {i: 1.5 * scores[i] / scores[chosen].sum() for i in chosen}
        routed = sum(share * expert(f"experts.{i}", row) for i, share in shares.items())
        outputs.append(routed + expert("shared_experts", row))
    rows = rows + torch.stack(outputs)
    return rows, normed("shared_head.norm", rows) @ held["shared_head.head.weight"].T


@torch.no_grad()
def test_logits_equal_a_plain_implementation(tmp_path: Path) -> None:
    held = with_mtp(tmp_path)
    head = loaded(tmp_path)
    found = head(TOKENS, head.fuse(HIDDEN), PLACES, CAUSAL)
    handed_on, logits = plain(held)
    torch.testing.assert_close(head.handed_on(found), handed_on, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.logits(found), logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_keys_and_values_kept_are_those_that_rows_attend_to(tmp_path: Path) -> None:
    with_mtp(tmp_path)
    head = loaded(tmp_path)
    seen: list[tuple[torch.Tensor, ...]] = []

    def see(layer: int, *rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows[1:])
        return attend(*rows)

    head(TOKENS, HIDDEN, PLACES, ByRows(see))
    (held,) = head.keys_values(TOKENS, HIDDEN, PLACES, ByRows(see))
    for kept, used in zip(held, seen[0], strict=True):
        assert torch.equal(kept, used)


def test_experts_may_be_stored_together(tmp_path: Path) -> None:
    held = with_mtp(tmp_path / "apart")
    names = [[f"mlp.experts.{i}.{part}_proj.weight" for i in range(EXPERTS)] for part in PARTS]
    gate, up, down = (torch.stack([held[name] for name in each]) for each in names)
    change: dict[str, torch.Tensor | None] = {
        "mlp__experts__gate_up_proj": torch.cat((gate, up), dim=1),
        "mlp__experts__down_proj": down,
        **{name.replace(".", "__"): None for each in names for name in each},
    }
    with_mtp(tmp_path / "together", **change)
    first, second = (loaded(tmp_path / name).state_dict() for name in ("apart", "together"))
    assert first.keys() == second.keys()
    assert all(torch.equal(each, second[name]) for name, each in first.items())


def test_a_checkpoint_may_leave_embedding_and_output_to_the_target(tmp_path: Path) -> None:
    with_mtp(tmp_path, embed_tokens__weight=None, shared_head__head__weight=None)
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
    with_mtp(tmp_path, **change)
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path)


def test_the_layer_of_another_target_is_refused(tmp_path: Path) -> None:
    with_mtp(tmp_path)
    with pytest.raises(ConfigError, match="its hidden_size is 48, the target's 32"):
        loaded(tmp_path, TargetShape(32, DEFAULT_VOCAB_SIZE, LAYERS))
    with pytest.raises(ConfigError, match="no multi-token-prediction layer"):
        loaded(tiny_checkpoint("llama", tmp_path / "llama"))


def test_a_target_loads_with_the_layer_in_its_checkpoint(
    tmp_path: Path, checkpoint_factory: Callable[..., Path]
) -> None:
    with_mtp(tmp_path)
    plain_engine = load_engine(checkpoint_factory("glm4-moe"))
    engine = load_engine(tmp_path)
    assert len(engine.model.layers) == len(plain_engine.model.layers) == LAYERS


def test_what_routes_is_not_rounded_with_the_weights(tmp_path: Path) -> None:
    held = with_mtp(tmp_path)
    narrow = loaded(tmp_path)
    convert(narrow, torch.bfloat16)
    assert narrow.joint.weight.dtype is torch.bfloat16
    bias = held["mlp.gate.e_score_correction_bias"]
    assert torch.equal(narrow.layers[0].mlp.gate.e_score_correction_bias, bias)
