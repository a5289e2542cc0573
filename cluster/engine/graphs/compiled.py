"""The model's forward as one compiled graph, where a compiler is at hand.

An eager forward of a small or medium model on a CPU spends much of its time between its matrix
products: in Python, and in dozens of tiny operations per layer.  `torch.compile` fuses them.  The
graph is compiled once, with the number of rows left open; attention and packed layers stay
calls into our own code, as operators that the compiler does not look into.
"""

from __future__ import annotations

import itertools
import logging
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import library as operators

from cluster.engine.attention.seam import LayerPlan
from cluster.engine.cpu.packed_linear import PackedLinear, packed_layers
from cluster.engine.paths import StepInputs, StepOutputs
from cluster.engine.reminder import in_a_line
from cluster.engine.types import AttentionOptions

log = logging.getLogger(__name__)

_numbers = itertools.count()
# Which compiled forward an attention call belongs to: a graph can carry a number, not an object.
_forwards: WeakValueDictionary[int, CompiledForward] = WeakValueDictionary()


class CompiledForward:
    """Calls a transformers model's forward through `torch.compile`; one thread at a time.

    It serves logits alone: what hooks record, the compiler does not see.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """module: on the CPU, in eval mode.  Nothing is compiled before the first call."""
        _define_operators()
        self.plan: LayerPlan | None = None  # of the call under way
        self._number = next(_numbers)
        self._forward = torch.compile(module.forward, dynamic=True, fullgraph=True)
        self._has_worked = False
        self.has_failed = False
        _forwards[self._number] = self

    def __call__(self, inputs: StepInputs) -> StepOutputs | None:
        """None where it cannot be compiled or taps are wanted: then run it as it is."""
        if self.has_failed or inputs.taps:
            return None
        logit_rows = inputs.logit_rows
        num_wanted = len(logit_rows)
        if num_wanted < 2:
            # For one row the compiler would make a graph of its own; for none it would drop the
            # layers as dead code, and with them the writing of keys and values.
            logit_rows = logit_rows.new_zeros(2) if num_wanted == 0 else logit_rows.repeat(2)
        self.plan = inputs.plan
        try:
            output = self._forward(
                input_ids=inputs.token_ids.unsqueeze(0),
                position_ids=inputs.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=logit_rows,
                plan=self._number,
            )
        except Exception as error:
            if self._has_worked:
                raise
            # No compiler, or a model that has no single graph: both are common and harmless.
            log.warning("the forward is not compiled: %s", in_a_line(error))
            self.has_failed = True
            return None
        finally:
            self.plan = None
        self._has_worked = True
        return StepOutputs(output.logits[0, :num_wanted].float())


@cache
def _define_operators() -> Any:
    """Make our operators known to torch; the library lives as long as the process."""
    library: Any = operators.Library("drafthouse", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(
        "attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, int number, int layer, "
        "float scaling, float? softcap) -> Tensor"
    )
    library.impl("attend", _attend, "CPU")
    operators.register_fake("drafthouse::attend", _attend_shape, lib=library)
    library.define("packed_linear(Tensor rows, int number, int out_features) -> Tensor")
    library.impl("packed_linear", _packed_linear, "CPU")
    operators.register_fake("drafthouse::packed_linear", _packed_linear_shape, lib=library)
    return library


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    number: int,
    layer: int,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    plan = _forwards[number].plan
    assert plan is not None, "attention outside a forward"
    options = AttentionOptions(scaling, softcap, sinks)
    output = plan.attend_layer(layer, query, key, value, options)
    # The graph was compiled for a result that is laid out row by row and shares nothing.
    return output.clone(memory_format=torch.contiguous_format)


def _attend_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _packed_linear(rows: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
    layer: PackedLinear = packed_layers[number]
    return layer.product(rows)


def _packed_linear_shape(rows: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], out_features)
