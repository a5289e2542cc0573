"""Compares tree attention with the model's own forward on a few texts, once, at load.

It catches what no configuration tells: position biases, masks or states that an architecture keeps
outside its attention function.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from cluster.core import TokenArray, TokenTree, token_array
from cluster.engine.attention import seam
from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.engine.loading.model import LoadedModel
from cluster.engine.module_forward import decoder_layers
from cluster.engine.work import Steps, Work, run_alone
from cluster.errors import ConfigError, WorkerError
from cluster.records import frozen, record

_REQUEST, _NEIGHBOUR = "self-check", "self-check-neighbour"
# Relative error of a row of logits: float32's own is 1e-6 to 1e-5, a wrong layer's 0.1 to 1.
_FLOAT32_BOUND = 1e-3
# In coarser formats rounding alone moves the logits by some per cent, of one network much more than
# of another: so it is measured, and both forwards against one in float32, whose own error is a
# thousandth of theirs.  Two right ones are about as far from it as each other.
_ROUNDING_FACTOR = 4.0
# Where it cannot be measured, and never more: a wrong mask is off by about 1.
_LOOSEST_BOUND = 0.25
_NUM_NOISY = 3  # texts that are enough to measure it
_SHORT_TOKENS = 12
# The long case: keys of several blocks that are split among programs, and more rows than a tile
# has; where a window is not much longer, rows behind its edge.  The model's own attention holds
# the scores of all pairs, so it is no longer than it must.
_LONG, _BEHIND_WINDOW, _LONGEST = 600, 80, 1200
_CHAINS, _DEPTH = 4, 6
_PIECES, _NEIGHBOUR_TOKENS = 4, 40


@frozen
class Distance:
    """How far rows of trees are from plain forwards, relative to their length, and how far they may
    be."""

    deviation: float
    bound: float


@record
class _Case:
    """rows: the engine's logits, float32 [rows, vocab].  texts: in whose plain forwards the same
    stand.  wanted: of each text the positions; all of them are in the order of the rows."""

    rows: torch.Tensor
    texts: Sequence[TokenArray]
    wanted: Sequence[Sequence[int]]


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


def distances(
    engine: Steps, model: LoadedModel, *, is_long: bool | None = None
) -> dict[str, Distance]:
    """Of each case, by its name; raises ConfigError where a step fails.

    is_long: with the long case; None = on a GPU, where it takes a moment."""
    if is_long is None:
        is_long = model.device.type == "cuda"
    length = _long_len(engine, model) if is_long else 0
    found = {}
    try:
        found["short"] = _distance(model, _short(engine, _num_before(engine, model)))
        if length:
            found["long"] = _distance(model, _long(engine, length))
    except (WorkerError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"{model.architecture} cannot be served: {error}", param="model"
        ) from error
    finally:
        engine.release(_REQUEST)
        engine.release(_NEIGHBOUR)
    return found


def _num_before(engine: Steps, model: LoadedModel) -> int:
    """Where layers keep a matrix at borders of pages: so many tokens that the first chunk of the
    short case ends behind one, and the node that is committed stands behind the next."""
    length = 2 * engine.config.page_size
    has_room = _SHORT_TOKENS < length <= min(_LONG, engine.longest_context - _SHORT_TOKENS)
    return length - 6 if has_room and any(layer.state for layer in model.layers) else 0


def _short(engine: Steps, num_before: int) -> _Case:
    """One chunk, then the rest with a tree, then growth of the tree that was kept."""
    tokens = all_over(engine, num_before + _SHORT_TOKENS)
    context, drafts = tokens[:-6], tokens[-6:]
    tree = TokenTree.of(drafts[:4], [-1, -1, 0, 0])
    grown = TokenTree.of([drafts[3], drafts[4], drafts[5]], [-1, 0, -1])
    _run(engine, Work(_REQUEST, 0, context[:-3], tenant=_nobody()))
    rows = _run(engine, Work(_REQUEST, len(context) - 3, context[-3:], tree))
    engine.retain(_REQUEST, [0], [3])
    more = _run(engine, Work(_REQUEST, len(context) + 1, tokens[:0], grown, num_cached_nodes=1))
    engine.release(_REQUEST)
    paths = [[], [0], [1], [0, 2], [0, 3], [0, 3, 4], [0, 5]]
    texts = [np.concatenate((context, drafts[path])) for path in paths]
    return _Case(torch.cat((rows, more)), texts, [[len(text) - 1] for text in texts])


def _long_len(engine: Steps, model: LoadedModel) -> int:
    """The tokens of the long case; 0 where the engine has no room for it."""
    windows = [layer.window + _BEHIND_WINDOW for layer in model.layers if layer.window]
    length = max([_LONG, *(each for each in windows if each <= _LONGEST)])
    neighbour = _PIECES * _NEIGHBOUR_TOKENS
    # Pages that are begun by either: rounded up generously.
    return length if 2 * (length + _CHAINS * _DEPTH + neighbour) <= engine.longest_context else 0


def _long(engine: Steps, length: int) -> _Case:
    """A text whose pages lie apart, because another one's growth takes those between, which ends
    before the last piece; behind it chains of nodes that alternate."""
    tokens = all_over(engine, length + _CHAINS * _DEPTH)
    context, drafts = tokens[:length], tokens[length:]
    tree = TokenTree.of(drafts, [-1] * _CHAINS + [*range(len(drafts) - _CHAINS)])
    tenant = _nobody()
    edges = np.linspace(0, length, _PIECES + 1).astype(int).tolist()
    for piece, (start, stop) in enumerate(pairwise(edges[:-1])):
        _run(engine, Work(_REQUEST, start, context[start:stop], tenant=tenant))
        begun = piece * _NEIGHBOUR_TOKENS
        others = tokens[begun : begun + _NEIGHBOUR_TOKENS]
        _run(engine, Work(_NEIGHBOUR, begun, others, tenant=tenant + b"neighbour"))
    engine.release(_NEIGHBOUR)
    rows = _run(engine, Work(_REQUEST, edges[-2], context[edges[-2] :], tree, tenant=tenant))
    engine.release(_REQUEST)
    order, texts, wanted = [], [], []
    for chain in range(_CHAINS):
        own = [1 + chain + _CHAINS * depth for depth in range(_DEPTH)]
        texts.append(np.concatenate((context, drafts[chain::_CHAINS])))
        first = chain > 0  # the context's last row is asked of one text alone
        order += [0, *own][first:]
        wanted.append([*range(length - 1, length + _DEPTH)][first:])
    return _Case(rows[order], texts, wanted)


def _nobody() -> bytes:
    """A tenant of no other text: what an earlier check wrote is not to be found."""
    return secrets.token_bytes(8)


def all_over(engine: Steps, count: int) -> TokenArray:
    """So many tokens from all over the vocabulary."""
    return token_array((np.arange(count) * 7919 + 13) % engine.vocab_size)


def _distance(model: LoadedModel, case: _Case) -> Distance:
    expected = _reference(model, case)
    if model.layers[0].dtype == torch.float32:
        return Distance(float(_errors(case.rows, expected).max()), _FLOAT32_BOUND)
    # In coarse formats a router of experts may flip in one row: judge by the typical one.
    precise = _precise(model, case)
    if precise is not None:
        own = float(_errors(expected, precise).median())
        deviation = float(_errors(case.rows, precise).median())
        return Distance(deviation, min(_ROUNDING_FACTOR * own, _LOOSEST_BOUND))
    deviation = float(_errors(case.rows, expected).median())
    return Distance(deviation, _bound_by_noise(model, case, expected))


def _errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The relative error of each row."""
    return (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-6)


def _precise(model: LoadedModel, case: _Case) -> torch.Tensor | None:
    """`_reference` in float32, the weights of each module widened while it runs; None where they
    are not all there to be widened, or there is no memory for it."""
    module, kept = model.module, dict[torch.nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]()
    if (
        getattr(module, "is_quantized", False)
        or any(isinstance(each, PackedLinear) for each in module.modules())
        or any(type(each) is not torch.nn.Parameter for each in module.parameters())
    ):
        return None

    def widen(own: torch.nn.Module, _: Any) -> None:
        kept[own] = [(each, each.data) for each in own.parameters(recurse=False)]
        for parameter, data in kept[own]:
            parameter.data = data.float()

    def narrow(own: torch.nn.Module, *_: Any) -> None:
        for parameter, data in kept.pop(own, ()):
            parameter.data = data

    # Its code may count on its format; torch.OutOfMemoryError is a RuntimeError.
    with ExitStack() as hooks, suppress(RuntimeError, TypeError, ValueError):
        for each in module.modules():
            if next(each.parameters(recurse=False), None) is not None:
                hooks.callback(narrow, each)
                hooks.enter_context(each.register_forward_pre_hook(widen))
                hooks.enter_context(each.register_forward_hook(narrow))
        return _reference(model, case)
    return None


def _bound_by_noise(model: LoadedModel, case: _Case, expected: torch.Tensor) -> float:
    """The part of the typical row's error that rounding explains, where there is no forward in
    float32: what noise of one unit in the last place does after every layer.  Two right forwards
    were seen to differ by as much, and at most by twice that."""
    unit = torch.finfo(model.layers[0].dtype).eps / 2
    layers = decoder_layers(model.module, len(model.layers))
    if layers is None or getattr(model.module, "is_quantized", False):
        return _LOOSEST_BOUND
    generator = torch.Generator().manual_seed(0)

    def shake(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        noise = 2.0 * torch.rand(hidden.shape, generator=generator) - 1.0
        shaken = hidden * (1.0 + unit * noise.to(hidden)).to(hidden.dtype)
        return (shaken, *output[1:]) if isinstance(output, tuple) else shaken

    few = _Case(case.rows, case.texts[-_NUM_NOISY:], case.wanted[-_NUM_NOISY:])
    with ExitStack() as hooks:
        for each in layers:
            hooks.enter_context(each.register_forward_hook(shake))
        shaken = _reference(model, few)
    noise = float(_errors(shaken, expected[-len(shaken) :]).median())
    return min(_ROUNDING_FACTOR * noise, _LOOSEST_BOUND)


def _run(engine: Steps, work: Work) -> torch.Tensor:
    output = run_alone(engine, work)
    assert output.logits is not None, f"the self-check was refused: {output}"
    return output.logits.clone()


def _reference(model: LoadedModel, case: _Case) -> torch.Tensor:
    """The rows of the model's own forward of each text: float32 [rows, vocab]."""
    module = model.module
    rows = []
    module.set_attn_implementation("eager")
    try:
        # Not in inference mode: weights may be exchanged meanwhile.
        with torch.no_grad():
            for text, wanted in zip(case.texts, case.wanted, strict=True):
                ids = torch.from_numpy(text.astype(np.int64)).to(model.device).unsqueeze(0)
                keep = torch.tensor(wanted, device=model.device)
                found = module(input_ids=ids, use_cache=False, logits_to_keep=keep)
                rows.append(found.logits[0].float())
    finally:
        module.set_attn_implementation(seam.IMPLEMENTATION)
    return torch.cat(rows)
