"""transformers' own forward of a model: the path that serves every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from cluster.engine.adapters import AdapterShelf, LayerByLayer
from cluster.engine.paths import StepInputs, StepOutputs
from cluster.engine.types import Ability


class ModuleForward:
    """Calls the module as it is.  Where its layers stand in one list, hooks copy what is tapped;
    they are there during such a step alone, as are those of adapters."""

    def __init__(self, module: Any, num_layers: int, adapters: AdapterShelf) -> None:
        self._module = module
        self._adapters = adapters
        self._layers = decoder_layers(module, num_layers)
        taps = () if self._layers is None else (Ability.TAPS,)
        self.abilities = frozenset((Ability.ADAPTERS, *taps))

    def __call__(self, inputs: StepInputs) -> StepOutputs:
        if inputs.adapters is None:
            return self._run(inputs)
        with self._adapters.current.applied(inputs):
            return self._run(replace(inputs, plan=LayerByLayer(inputs.plan)))

    def _run(self, inputs: StepInputs) -> StepOutputs:
        with self._recording(inputs) as states:
            output = self._module(
                input_ids=inputs.token_ids.unsqueeze(0),
                position_ids=inputs.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=inputs.logit_rows,
                plan=inputs.plan,
            )
        logits: torch.Tensor = output.logits[0]
        return StepOutputs(logits.float(), states.rows)

    @contextmanager
    def _recording(self, inputs: StepInputs) -> Iterator[_States]:
        """A context that collects the hidden states that pass by inside it."""
        states = _States(inputs)
        hooks = []
        try:
            for tap in set(inputs.taps):
                assert self._layers is not None, "a step that needs taps was sent here"
                if tap < len(self._layers):
                    hook = states.input_hook(tap)
                    hooks.append(
                        self._layers[tap].register_forward_pre_hook(hook, with_kwargs=True)
                    )
                else:
                    # The output layer is given the wanted rows alone; the decoder gives all.
                    decoder = self._module.get_decoder()
                    hooks.append(decoder.register_forward_hook(states.output_hook(tap)))
            yield states
        finally:
            for each in hooks:
                each.remove()


class _States:
    """Copies of what the hooks are shown, made at once: a layer may go on in the same memory.

    rows: [rows, taps, hidden], from the first hook on."""

    def __init__(self, inputs: StepInputs) -> None:
        self._taps = inputs.taps
        self._device = inputs.token_ids.device
        self.rows: torch.Tensor | None = None

    def input_hook(self, tap: int) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._take(tap, args[0] if args else kwargs["hidden_states"])

        return hook

    def output_hook(self, tap: int) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._take(tap, output[0])

        return hook

    def _take(self, tap: int, hidden: torch.Tensor) -> None:
        """hidden: [1, rows, hidden]."""
        if self.rows is None:
            shape = (hidden.shape[1], len(self._taps), hidden.shape[2])
            self.rows = torch.empty(shape, dtype=hidden.dtype, device=self._device)
        for column, each in enumerate(self._taps):
            if each == tap:
                self.rows[:, column] = hidden[0]


def decoder_layers(module: torch.nn.Module, num_layers: int) -> torch.nn.ModuleList | None:
    """The model's layers, where they stand in one list."""
    for each in module.modules():
        if isinstance(each, torch.nn.ModuleList) and len(each) == num_layers:
            return each
    return None
