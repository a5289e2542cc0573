"""What a round of a draft head asks of a GPU, by the drafter's own code on `meta`.

Kernels do not depend on sizes, so that the heads are small.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.core import EMPTY_TOKENS, Commit, SamplingParams, token_array
from cluster.draft.base import DrafterContext, DraftTask
from cluster.draft.eagle3 import Eagle3Drafter
from cluster.draft.head_drafter import MedusaDrafter
from cluster.draft.inside import StepRows
from cluster.draft.options import Eagle3Options, MedusaOptions
from cluster.engine.types import LayerSpec
from tests.support.draft.heads import random_eagle3, random_medusa
from tests.support.gpu.counting import META, Counting

_NAME = "text"
_LENGTH = 40
_NODES = 8
_KINDS = {
    "EAGLE-3": (Eagle3Drafter, Eagle3Options, random_eagle3),
    "Medusa": (MedusaDrafter, MedusaOptions, random_medusa),
}
_TARGET = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=96,
    max_position_embeddings=512,
)


class Graphs:
    """A `Capture` that counts: what a graph cannot hold raises.

    launches: of graphs so far."""

    def __init__(self) -> None:
        self.launches = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        with Counting() as counting:
            run()
        assert counting.copies == 0, "a copy from the host in a graph"

        def replay() -> None:
            self.launches += 1

        return replay


class MetaHost:
    """A `Host` on `meta` of one text."""

    model_hash = ""
    num_layers = _TARGET.num_hidden_layers
    hidden_size = _TARGET.hidden_size
    vocab_size = _TARGET.vocab_size
    device = META
    dtype = torch.bfloat16

    def __init__(self, layers: list[LayerSpec], capture: Graphs | None) -> None:
        self.capture = capture
        self.caches = [
            torch.zeros(64, 2, each.num_kv_heads, each.head_dim, dtype=each.dtype, device=META)
            for each in layers
        ]
        self.text = token_array(np.arange(_LENGTH) % self.vocab_size)

    def slots(self, request_id: str) -> Any:
        return np.arange(_LENGTH)

    def token_ids(self, request_id: str) -> Any:
        return self.text

    def weight(self, name: str) -> torch.Tensor:
        return torch.zeros(self.vocab_size, self.hidden_size, dtype=self.dtype)


def rounds() -> dict[str, Mapping[str, int]]:
    """Of one text: its last step's row is written, and a tree of eight nodes grows behind it; pass
    by pass as the host grows it, and by graphs."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "target"
        LlamaForCausalLM(_TARGET).save_pretrained(target)
        for name, (drafter, options, written) in _KINDS.items():
            own = options(model=str(written(Path(folder) / name, target)))
            found[name] = _round(drafter, own, None)
            if drafter is Eagle3Drafter:
                found[f"{name} in graphs"] = _round(drafter, own, Graphs())
    return found


def _round(kind: Any, options: Any, graphs: Graphs | None) -> Mapping[str, int]:
    like = LayerSpec(_TARGET.num_key_value_heads, 8, torch.bfloat16, META)
    host = MetaHost(list(kind.kv_layers(options, like)), graphs)
    last = _LENGTH - 1
    with torch.no_grad(), Counting(answer=_answer):
        drafter = kind(DrafterContext(_NAME, 32, 4, host.vocab_size, "", host), options)
        drafter.read([_rows(drafter, host, 0, last)])
        # What graphs there are to be is captured.
        _drafted(drafter, 0, host.text, _rows(drafter, host, last, _LENGTH))
    with torch.no_grad(), Counting(answer=_answer) as counting:
        rows = _rows(drafter, host, last, _LENGTH)
        given, before = counting.counted(), graphs.launches if graphs else 0
        passes = _drafted(drafter, 1, host.text, rows)
    assert passes, "no tree grows"
    return {
        "passes": passes,
        "kernels": (counting.counted() - given).total(),
        "graphs": graphs.launches - before if graphs else 0,
        "copies to the device": counting.copies,
        "waits": counting.waits,
    }


def _drafted(drafter: Any, generation: int, ids: Any, rows: StepRows) -> int:
    """Slices of a round behind a step's rows."""
    params = SamplingParams(temperature=0.0, max_tokens=64)
    text = token_array([*ids, 5])
    commit = Commit(_NAME, generation, 0, 0, text, len(text), _NODES, params=params)
    drafter.observe([commit])
    drafter.read([rows])
    passes = 0
    while found := drafter.propose([DraftTask(_NAME, generation, _NODES)]):
        passes += 1
        if found[0].is_complete:
            break
    return passes


def _answer(name: str, asked: torch.Tensor) -> Any:
    """Zeros; of a round in graphs eight nodes, four below the root and four below its first child.

    The head writes every third token, and its logits are zeros: the best are its first."""
    if asked.dim() != 3:
        return None
    found = np.zeros(asked.shape, np.int64)
    num_candidates = (asked.shape[2] - 2) // 2
    found[:, :, 2 : 2 + num_candidates] = 3 * np.arange(num_candidates)
    for place in range(1 + _NODES):
        child, parent = (place - 1) % 4, (place - 1) // 4
        found[:, place, :2] = 1 + 3 * child, max(parent, 0)
    return found


def _rows(drafter: Any, host: MetaHost, first: int, stop: int) -> StepRows:
    """Of the text from there on."""
    taps = torch.zeros(stop - first, len(drafter.wants.taps), host.hidden_size, device=META)
    own, none = host.text[first:stop], EMPTY_TOKENS
    return StepRows(
        _NAME, 0, "", b"", first, own, len(own), none, none, 5, taps=taps.to(host.dtype)
    )
