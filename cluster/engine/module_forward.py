"""transformers' own forward of a model: the path that serves every step."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from cluster.engine.adapters import AdapterShelf
from cluster.engine.paths import StepInputs, StepOutputs, TapStates


class ModuleForward:
    """Calls the module as it is.  Where its layers stand in one list, hooks copy what is tapped;
    they are there during such a step alone, as are those of adapters.

    has_taps: whether steps may ask for any."""

    def __init__(self, module: Any, num_layers: int, adapters: AdapterShelf) -> None:
        self._module = module
        self._adapters = adapters
        self._layers = decoder_layers(module, num_layers)
        # Gemma 3n's layers hand on several states of a token, of which a head would want one.
        is_several = getattr(getattr(module, "config", None), "altup_num_inputs", 1) > 1
        self.has_taps = self._layers is not None and not is_several

    def __call__(self, inputs: StepInputs) -> StepOutputs:
        states = TapStates(inputs)
        with ExitStack() as hooks:
            if inputs.adapters is not None:
                hooks.enter_context(self._adapters.current.applied(inputs))
            for tap in set(inputs.taps):
                hooks.enter_context(self._hook(states, tap))
            output = self._module(
                input_ids=inputs.token_ids.unsqueeze(0),
                position_ids=inputs.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=inputs.logit_rows,
                plan=inputs.plan,
            )
        logits: torch.Tensor = output.logits[0]
        return StepOutputs(logits.float(), states.rows)

    def _hook(self, states: TapStates, tap: int) -> RemovableHandle:
        """Let the states be shown what is tapped: [1, rows, hidden]."""
        assert self._layers is not None, "a step that needs taps was sent here"
        if tap == len(self._layers):
            # The output layer is given the wanted rows alone; the decoder gives all.
            return self._module.get_decoder().register_forward_hook(
                lambda decoder, args, output: states.take(tap, output[0][0])
            )
        return self._layers[tap].register_forward_pre_hook(
            lambda layer, args, given: states.take(tap, (*args, given.get("hidden_states"))[0][0]),
            with_kwargs=True,
        )


def decoder_layers(module: torch.nn.Module, num_layers: int) -> torch.nn.ModuleList | None:
    """The model's layers, where they stand in one list."""
    for each in module.modules():
        if isinstance(each, torch.nn.ModuleList) and len(each) == num_layers:
            return each
    return None
