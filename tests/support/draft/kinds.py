"""The kinds of drafters with a draft head, each with tiny heads and what it keeps of a text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.draft import heads, mtp
from tests.support.draft.blocks import random_block, right_block
from tests.support.draft.inside import Inside, config_of
from tests.support.draft.plain import CAUSAL
from tests.support.engine.taps import expected_taps

# Writes a head of random weights into a folder, for a target.
Make = Callable[..., Path]


@dataclass(frozen=True)
class Kind:
    """kind: of the drafter.  right: writes one that knows how `cyclic_target` goes on, of which
    each step accepts more than so many drafts, greedy and sampled.  called: in refusals."""

    kind: str
    random: Make
    right: Make
    least: tuple[float, float]
    called: str = ""

    def config(self, target: Path, folder: Path, fill: float | None = None, **settings: Any) -> Any:
        """Of a random head in its target."""
        head = self.random(folder, target, fill=fill)
        return config_of(head if self.kind == "mtp" else target, self.kind, head, **settings)

    def inside(self, *given: Any, **settings: Any) -> Inside:
        return Inside(self.config(*given, **settings))


def _random_mtp(
    folder: Path, target: Path, *, architecture: str = "glm4-moe", fill: float | None = None
) -> Path:
    change = {"eh_proj.weight": torch.full((mtp.SIZE, 2 * mtp.SIZE), fill)} if fill else {}
    mtp.with_mtp(folder, architecture, **change)
    return folder


KINDS = {
    "eagle3": Kind("eagle3", heads.random_eagle3, heads.right_eagle3, (5.0, 1.5), "EAGLE-3 head"),
    "peagle": Kind("peagle", heads.random_peagle, heads.right_peagle, (0.9, 0.9), "P-EAGLE head"),
    "medusa": Kind("medusa", heads.random_medusa, heads.right_medusa, (2.8, 1.0), "Medusa heads"),
    "dflash": Kind("block", partial(random_block, spark=False), right_block, (5.0, 1.5)),
    "dspark": Kind(
        "block",
        partial(random_block, spark=True),
        right_block,
        (5.0, 1.5),
        "DFlash or DSpark drafter",
    ),
    "mtp": Kind("mtp", _random_mtp, mtp.right_mtp, (5.0, 1.5)),
    "mtp-latent": Kind(
        "mtp",
        partial(_random_mtp, architecture="deepseek-v3"),
        mtp.right_latent_mtp,
        (5.0, 1.5),
    ),
    "mtp-apart": Kind(
        "mtp", partial(_random_mtp, architecture="qwen3.5"), mtp.right_mtp_apart, (5.0, 1.5)
    ),
}


def kept_of(
    inside: Inside, oracle: Any, tokens: Sequence[int]
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """By a plain forward of a whole text: each layer's keys and values, of all tokens or, where
    rows take those before them, of all but the first; and the fused hidden rows."""
    head, ids = inside.drafter._head, torch.tensor(tokens)
    with torch.inference_mode():
        taps = expected_taps(oracle, np.array(tokens), inside.drafter.wants.taps)
        fused = head.fuse(taps.flatten(1))
        if head.takes_before:
            rows, ids = fused[:-1], ids[1:]
        else:
            rows = fused
        return head.keys_values(ids, rows, torch.arange(len(ids)), CAUSAL), fused


def check_kept(inside: Inside, oracle: Any, request_id: str, tokens: Sequence[int]) -> None:
    """What lies in the target's pages is what plain forwards give."""
    host, head = inside.drafter._cache._host, inside.drafter._head
    slots = torch.from_numpy(host.slots(request_id))[: len(tokens)]
    assert len(slots) >= len(tokens) - 1
    layers, fused = kept_of(inside, oracle, list(tokens)[: len(slots)])
    found = [(cache[slots], layer) for cache, layer in zip(host.caches, layers, strict=False)]
    assert len(found) == len(head.layers)
    for cache, wanted in found:
        for held, each in zip(cache[int(head.takes_before) :].unbind(1), wanted, strict=True):
            torch.testing.assert_close(held, each, atol=1e-4, rtol=1e-4)
    if head.takes_before:
        hidden = host.caches[len(layers)][slots].flatten(1)[:, : fused.shape[1]]
        torch.testing.assert_close(hidden, fused, atol=1e-4, rtol=1e-4)
