"""Compares tree attention with the model's own forward on a few tokens, once, at load.

It catches what no configuration tells: position biases, masks or states that an architecture keeps
outside its attention function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from cluster.core import TokenArray, TokenTree, token_array
from cluster.engine.attention import seam
from cluster.engine.loading.model import LoadedModel
from cluster.engine.work import Output, Work
from cluster.errors import ConfigError, WorkerError

# What the check needs: slots of the cache, positions, and rows of one step.
MIN_SLOTS = 16
MIN_ROWS = 8
_REQUEST = "self-check"
# Relative error of a row of logits.  A wrong mask is off by about 1; the coarse formats' own noise
# in a deep random network reaches some per cent.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25}


class Steps(Protocol):
    """The part of an engine that the check uses."""

    def submit(self, work: Work) -> None: ...
    def step(self) -> list[Output]: ...
    def retain(self, request_id: str, path: Sequence[int], keep: Sequence[int] = ()) -> None: ...
    def release(self, request_id: str) -> None: ...


def check(engine: Steps, model: LoadedModel) -> None:
    """Raise ConfigError, naming the architecture, unless rows of trees equal plain forwards."""
    tokens = token_array((np.arange(12) * 7919 + 13) % model.vocab_size)
    context, drafts = tokens[:6], tokens[6:]
    # One chunk, then the rest with a tree, then growth of the tree that was kept.
    tree = TokenTree.of(drafts[:4], [-1, -1, 0, 0])
    grown = TokenTree.of([drafts[3], drafts[4], drafts[5]], [-1, 0, -1])
    try:
        _run(engine, Work(_REQUEST, 0, context[:3]))
        rows = _run(engine, Work(_REQUEST, 3, context[3:], tree))
        engine.retain(_REQUEST, [0], [3])
        more = _run(engine, Work(_REQUEST, 7, tokens[:0], grown, num_cached_nodes=1))
    except WorkerError as error:
        raise ConfigError(
            f"{model.architecture} cannot be served: {error.message}", param="model"
        ) from error
    finally:
        engine.release(_REQUEST)

    paths = [[], [0], [1], [0, 2], [0, 3], [0, 3, 4], [0, 5]]
    expected = _reference(model, [np.concatenate((context, drafts[path])) for path in paths])
    found = torch.cat((rows, more))
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-6)
    dtype = model.layers[0].dtype
    # In coarse formats a router of experts may flip in one row: judge by the typical one.
    deviation = float(errors.max() if dtype == torch.float32 else errors.median())
    if not deviation <= _TOLERANCES.get(dtype, 0.25):
        raise ConfigError(
            f"{model.architecture} cannot be served: with tree attention its logits are off by "
            f"{deviation:.1%}; it uses a form of attention the engine does not know",
            param="model",
        )


def _run(engine: Steps, work: Work) -> torch.Tensor:
    engine.submit(work)
    outputs: list[Output] = []
    while not outputs:
        outputs = engine.step()
    logits = outputs[0].logits
    assert logits is not None, f"the self-check was refused: {outputs[0]}"
    return logits.clone()


def _reference(model: LoadedModel, paths: Sequence[TokenArray]) -> torch.Tensor:
    """The last row of the model's own forward of each path: float32 [paths, vocab]."""
    module = model.module
    rows = []
    module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            for path in paths:
                ids = torch.from_numpy(path.astype(np.int64)).to(model.device).unsqueeze(0)
                rows.append(module(input_ids=ids, use_cache=False).logits[0, -1].float())
    finally:
        module.set_attn_implementation(seam.IMPLEMENTATION)
    return torch.stack(rows)
