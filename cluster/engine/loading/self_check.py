"""Compares tree attention with the model's own forward on a few tokens, once, at load.

It catches what no configuration tells: position biases, masks or states that an architecture keeps
outside its attention function.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from cluster.core import TokenArray, TokenTree, token_array
from cluster.engine.attention import seam
from cluster.engine.loading.model import LoadedModel
from cluster.engine.module_forward import decoder_layers
from cluster.engine.work import Steps, Work, run_alone
from cluster.errors import ConfigError, WorkerError
from cluster.records import frozen

_REQUEST = "self-check"
# Relative error of a row of logits: float32's own is 1e-6 to 1e-5, a wrong layer's 0.1 to 1.
_FLOAT32_BOUND = 1e-3
# In coarser formats rounding alone moves the logits by some per cent, of one network much more than
# of another: so it is measured.  Two right forwards were seen to differ by as much as noise of one
# unit in the last place does after every layer, and at most by twice that.
_UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_NOISE_FACTOR = 4.0
# Where it cannot be measured, and never more: a wrong mask is off by about 1.
_LOOSEST_BOUND = 0.25
_NUM_NOISY = 3  # paths that are enough to measure it


@frozen
class Distance:
    """How far rows of trees are from plain forwards, relative to their length, and how far they may
    be."""

    deviation: float
    bound: float


def check(engine: Steps, model: LoadedModel) -> None:
    """Raise ConfigError, naming the architecture, unless rows of trees equal plain forwards."""
    for found in distances(engine, model).values():
        if not found.deviation <= found.bound:
            raise ConfigError(
                f"{model.architecture} cannot be served: with tree attention its logits are off by "
                f"{found.deviation:.1%}, of which rounding explains {found.bound:.1%}; it uses a "
                "form of attention the engine does not know",
                param="model",
            )


def distances(engine: Steps, model: LoadedModel) -> dict[str, Distance]:
    """Of each case, by its name; raises ConfigError where a step fails."""
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
    texts = [np.concatenate((context, drafts[path])) for path in paths]
    expected = _reference(model, texts)
    errors = _errors(torch.cat((rows, more)), expected)
    # In coarse formats a router of experts may flip in one row: judge by the typical one.
    is_exact = model.layers[0].dtype == torch.float32
    deviation = float(errors.max() if is_exact else errors.median())
    bound = _FLOAT32_BOUND if is_exact else _coarse_bound(model, texts, expected)
    return {"short": Distance(deviation, bound)}


def _errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The relative error of each row."""
    errors: torch.Tensor = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-6)
    return errors


def _coarse_bound(model: LoadedModel, texts: Sequence[TokenArray], expected: torch.Tensor) -> float:
    """The part of the typical row's error that rounding explains."""
    unit = _UNITS.get(model.layers[0].dtype)
    layers = decoder_layers(model.module, len(model.layers))
    if unit is None or layers is None or getattr(model.module, "is_quantized", False):
        return _LOOSEST_BOUND
    generator = torch.Generator().manual_seed(0)

    def shake(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        noise = 2.0 * torch.rand(hidden.shape, generator=generator) - 1.0
        shaken = hidden * (1.0 + unit * noise.to(hidden)).to(hidden.dtype)
        return (shaken, *output[1:]) if isinstance(output, tuple) else shaken

    with ExitStack() as hooks:
        for each in layers:
            hooks.enter_context(each.register_forward_hook(shake))
        shaken = _reference(model, texts[-_NUM_NOISY:])
    noise = float(_errors(shaken, expected[-_NUM_NOISY:]).median())
    return min(_NOISE_FACTOR * noise, _LOOSEST_BOUND)


def _run(engine: Steps, work: Work) -> torch.Tensor:
    output = run_alone(engine, work)
    assert output.logits is not None, f"the self-check was refused: {output}"
    return output.logits.clone()


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
