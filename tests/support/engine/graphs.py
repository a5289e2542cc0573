"""What the tests of graphed steps share: engines and their steps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cluster.core import TokenTree
from cluster.engine.engine import Engine
from cluster.engine.loading.model import load_model
from cluster.engine.parallel import RankGroup
from cluster.engine.work import Work
from tests.support.engine.driver import prompt, rows
from tests.support.engine.tiny import tiny
from tests.support.engine.triton_cases import tree_of_size

Steps = Sequence[Sequence[Work]]


def build(folder: Path, capture: Any = None, *, fused: bool = False, **settings: Any) -> Engine:
    """fused: by the kernels between a layer's products too, which the interpreter takes as long for
    as for attention."""
    own = {"attention": "triton", "cuda_graphs": capture is not None}
    # However long the interpreter takes, no chunk is cut for that.
    config = tiny(folder, settings, page_size=4, max_batch_tokens=16, max_chunk_s=3600.0, **own)
    group = RankGroup() if config.tensor_parallel > 1 else None
    model = load_model(config)
    if not fused:
        model = replace(model, fused=None)
    return Engine(config, model, group=group, capture=capture)


def answers(engine: Engine, steps: Steps) -> list[torch.Tensor]:
    """The logits of all works; those of one step are submitted together."""
    found: list[torch.Tensor] = []
    for works in steps:
        for work in works:
            engine.submit(work)
        outputs = {}
        while engine.has_pending:
            outputs |= {output.request_id: output for output in engine.step()}
        found += [rows(outputs[work.request_id]) for work in works]
        for work in works:
            engine.retain(work.request_id, [], range(len(work.tree)))
    return found


def check_equal(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float = 2e-5
) -> None:
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, atol=tolerance, rtol=tolerance)


def decoding(names: str, start: int, count: int) -> Steps:
    """A prompt each, then one token each per step."""
    first = [Work(name, 0, prompt(start, seed=ord(name))) for name in names]
    return [
        first,
        *([Work(name, start + at, prompt(1, seed=at)) for name in names] for at in range(count)),
    ]


def _growing() -> Steps:
    """A tree whose first nodes stay cached while it grows, then one without new context."""
    small = TokenTree.of([5, 6, 7], [-1, 0, 0])
    large = TokenTree.of([5, 6, 7, 8, 9, 10, 11], [-1, 0, 0, 1, 2, 2, 4])
    return [
        [Work("a", 0, prompt(9), small)],
        [Work("a", 9, prompt(0), large, num_cached_nodes=3)],
        [Work("a", 9, prompt(2), small)],
    ]


# The interpreter takes 20 ms for each program: an item of a layer's work for one of its key heads.
FEW_PROGRAMS = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
}
# The others keep their two key heads, and one layer of each kind.
FEW_LAYERS = {
    "llama": FEW_PROGRAMS,
    "mistral-sliding": {"num_hidden_layers": 1},
    "gemma2": {"num_hidden_layers": 2},
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}
MIXED = "a prompt beside a tree and a decoding row"
CHUNKS = "a prompt of several chunks"
APART = "a page has other numbers in layers with a window, behind a text whose windows slid"
GEMMA2 = ("gemma2", ("cached nodes",))
CASES = {
    "one sequence, its context growing": decoding("a", 14, 4),
    "several sequences, of several widths": [*decoding("abc", 14, 1), *decoding("d", 5, 1)],
    "trees of several sizes in one width": [
        [Work("a", 0, prompt(17), tree_of_size(5))],
        [Work("a", 17, prompt(1), tree_of_size(7))],
        [Work("a", 18, prompt(1), tree_of_size(4))],
    ],
    MIXED: [
        [Work("a", 0, prompt(20)), Work("b", 0, prompt(6, seed=2))],
        [
            Work("a", 20, prompt(1), tree_of_size(4)),
            Work("b", 6, prompt(1)),
            Work("c", 0, prompt(7, seed=3)),
        ],
    ],
    "cached nodes": _growing(),
    CHUNKS: [[Work("a", 0, prompt(40), tree_of_size(3))]],
    APART: [[Work("a", 0, prompt(33))], [Work("b", 0, prompt(12), tree_of_size(4))]],
}
LFM2 = ("lfm2", (MIXED, "cached nodes", APART))
ALL = (("llama", tuple(CASES)), ("mistral-sliding", (MIXED,)), GEMMA2, ("gemma3", (APART,)), LFM2)
