"""What draft heads compute, written out once more from the papers, with nothing shared."""

from collections.abc import Sequence

import torch

from cluster.draft.heads.head import Sight
from tests.support.draft.heads import ByRows

Held = dict[str, torch.Tensor]


def rms(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows * (rows.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotated(rows: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    dim = rows.shape[-1]
    angles = positions[:, None] / theta ** (torch.arange(0, dim, 2) / dim)
    cos, sin = (torch.cat([f(angles)] * 2, 1)[:, None] for f in (torch.cos, torch.sin))
    first, second = rows.chunk(2, dim=-1)
    return rows * cos + torch.cat([-second, first], -1) * sin


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None = None
) -> torch.Tensor:
    """visible: bool[queries, keys]; None = no row sees those behind it."""
    repeats = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys) / query.shape[-1] ** 0.5
    if visible is None:
        visible = torch.ones(len(query), len(key)).tril(len(key) - len(query)).bool()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


CAUSAL = ByRows(lambda layer, *rows: attend(*rows))


def behind(kept: Sequence[tuple[torch.Tensor, torch.Tensor]], sights: Sequence[Sight]) -> ByRows:
    """Rows of a pass attend to the keys and values kept of a text, and to each other.

    sights: of each layer."""

    def see(layer, query, key, value):
        keys, values = (torch.cat(pair) for pair in zip(kept[layer], (key, value), strict=True))
        places, sight = torch.arange(len(keys)), sights[layer]
        distance = places[-len(query) :, None] - places
        seen = (distance >= 0) | (not sight.is_causal)
        if sight.window:
            seen &= distance < sight.window
        return attend(query, keys, values, seen)

    return ByRows(see)


def part_of(held: Held, prefix: str) -> Held:
    return {
        name.removeprefix(prefix): each for name, each in held.items() if name.startswith(prefix)
    }


def projected(of: Held, name: str, rows: torch.Tensor) -> torch.Tensor:
    bias = of.get(f"self_attn.{name}_proj.bias", torch.zeros(1))
    return rows @ of[f"self_attn.{name}_proj.weight"].T + bias


def behind_attention(of: Held, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """The rest of a Llama's or Qwen3's layer."""
    hidden = residual + projected(of, "o", attended.flatten(1))
    inner = rms(hidden, of["post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(inner @ of["mlp.gate_proj.weight"].T)
    return hidden + (gate * (inner @ of["mlp.up_proj.weight"].T)) @ of["mlp.down_proj.weight"].T
