"""Medusa: heads on the target's last hidden row, one a position ahead (Cai et al. 2024).

Reads the authors' folders and vLLM's form.  Head h drafts the token h + 1 places behind the one
that the target draws from the same row.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from cluster.draft.heads.checkpoint import HeadConfig, HeadTarget, Tensors, read_tensors
from cluster.records import frozen


@frozen
class MedusaSpec:
    """num_layers: residual blocks of each head.  uses_target_head: drafts are read by the target's
    own output layer.  shares_head: by one of the file, for all heads."""

    num_heads: int
    num_layers: int
    hidden_size: int
    draft_vocab_size: int
    has_bias: bool = True
    shares_head: bool = False
    uses_target_head: bool = False
    taps: tuple[int, ...] = (-1,)


class _Residual(nn.Module):
    """layers: each adds to its rows."""

    def __init__(self, spec: MedusaSpec) -> None:
        super().__init__()
        size = spec.hidden_size
        self.layers = nn.ModuleList(
            nn.Linear(size, size, bias=spec.has_bias) for _ in range(spec.num_layers)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = rows + nn.functional.silu(layer(rows))
        return rows


class MedusaHead(nn.Module):
    """All heads of a folder; its tensors have the names of vLLM's form.

    token_map: int64[draft_vocab], the target's id of each output."""

    token_map: torch.Tensor

    def __init__(self, spec: MedusaSpec, target_head: torch.Tensor | None) -> None:
        """target_head: [vocab, hidden], the target's output layer, where the spec uses it."""
        super().__init__()
        self.spec = spec
        self.blocks = nn.ModuleList(_Residual(spec) for _ in range(spec.num_heads))
        num_outputs = 1 if spec.shares_head or spec.uses_target_head else spec.num_heads
        self.lm_heads = nn.ModuleList(
            nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)
            for _ in range(num_outputs)
        )
        if target_head is not None:
            self.lm_heads[0].weight = nn.Parameter(target_head, requires_grad=False)
        self.register_buffer("token_map", torch.arange(spec.draft_vocab_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] after the target's final norm -> [rows, heads, draft_vocab]."""
        outputs = [self.lm_heads[i % len(self.lm_heads)] for i in range(self.spec.num_heads)]
        found = [output(block(hidden)) for output, block in zip(outputs, self.blocks, strict=True)]
        return torch.stack(found, dim=1)


def load(config: HeadConfig, target: HeadTarget) -> MedusaHead:
    """The heads of a folder, of which some draft by the target's output layer; raises ConfigError
    where they do not fit the target."""
    data = config.data
    size = data.get("hidden_size", target.hidden_size)
    config.size("hidden_size", size, target.hidden_size)
    tensors = read_tensors(config.folder, lambda name: name.removeprefix("medusa_heads."), target)
    is_vllm_form = any(name.startswith("blocks.") for name in tensors.held)
    num_heads, num_layers = _counted(config, tensors, _VLLM if is_vllm_form else _AUTHORS)
    shares = is_vllm_form and "lm_head.weight" in tensors.held

    def name_of(own: str) -> str:
        """The folder's name of a tensor of the head."""
        kind, head, *rest = own.split(".")
        if is_vllm_form or kind == "token_map":
            return "lm_head.weight" if shares and kind == "lm_heads" else own
        return f"{head}.{rest[1]}.linear.{rest[2]}" if rest[1:] else f"{head}.{num_layers}.weight"

    first = tensors.held.get(name_of("lm_heads.0.weight"))
    spec = MedusaSpec(
        num_heads,
        num_layers,
        target.hidden_size,
        target.vocab_size if first is None else len(first),
        has_bias=name_of("blocks.0.layers.0.bias") in tensors.held,
        shares_head=shares,
        uses_target_head=is_vllm_form and not shares and bool(data.get("original_lm_head")),
    )
    with target.device:
        head = MedusaHead(spec, target.weight("output") if spec.uses_target_head else None)
    token_map = tensors.take_if_there("token_map", (spec.draft_vocab_size,))
    kept = ["lm_heads.0.weight"] if spec.uses_target_head else []
    ids = head.token_map if token_map is None else token_map.to(torch.int64)
    tensors.fill(head, {"token_map": ids}, kept, name_of)
    if token_map is None and spec.draft_vocab_size != target.vocab_size:
        raise config.refused(
            f"its {spec.draft_vocab_size} tokens are not the target's {target.vocab_size}, and it "
            "has no token_map"
        )
    if token_map is not None and not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size:
        raise config.refused("token_map leads outside the target's vocabulary")
    return head.eval()


# What each form calls the weights of a head's layers.
_AUTHORS, _VLLM = "{head}.{layer}.linear.weight", "blocks.{head}.layers.{layer}.weight"


def _counted(config: HeadConfig, tensors: Tensors, form: str) -> tuple[int, int]:
    """Heads and their layers, counted by the tensors whose names are of this form: published
    configurations state wrong numbers."""
    pattern = re.escape(form).replace(r"\{head\}", r"(\d+)").replace(r"\{layer\}", r"(\d+)")
    found = [match for name in tensors.held if (match := re.fullmatch(pattern, name))]
    if not found:
        raise config.refused(f"it has no tensors of Medusa heads ({form})")
    return max(int(each[1]) for each in found) + 1, max(int(each[2]) for each in found) + 1
