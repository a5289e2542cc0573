"""One forward over the picks of a step: by a captured graph where one serves it, else eagerly."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from cluster.config.schema import EngineConfig
from cluster.engine.attention.backends import create_backend
from cluster.engine.attention.delta_rule import Piece, pieces_of
from cluster.engine.attention.sdpa import SdpaBackend
from cluster.engine.attention.seam import AttentionStep
from cluster.engine.graphs.capture import Capture
from cluster.engine.graphs.forward import GraphedForward, create_graphs
from cluster.engine.loading.inspection import MIN_ROWS
from cluster.engine.loading.model import LoadedModel
from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.paths import Events, StepInputs, StepOutputs
from cluster.engine.reminder import Reminder
from cluster.engine.schedule.batch import Batch, Pick, build_batch, padding
from cluster.engine.types import Vote
from cluster.engine.work import Drawn, StepSummary
from cluster.errors import ConfigError, WorkerError
from cluster.spec.transfer import sent

log = logging.getLogger(__name__)

# On CPU a matrix product of one row can take a far slower path than one of two.
_MIN_ROWS_ON_CPU = 2


class Forward:
    """Runs a model on a cache; not thread-safe.  graphs: None where steps run eagerly only."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        cache: KVCache,
        vote: Vote | None = None,
    ) -> None:
        """vote: of the ranks, which fall back together or not at all; None = it is the only one."""
        self.graphs: GraphedForward | None = None
        self._config = config
        self._model = model
        self._cache = cache
        self._vote = vote
        self._backend = create_backend(config.attention, model.device)
        self._min_rows = _MIN_ROWS_ON_CPU if model.device.type == "cpu" else 1
        self._noted: list[str] = []
        self._reminder = Reminder(time.monotonic) if model.device.type == "cuda" else None
        if config.attention == "auto" and isinstance(self._backend, SdpaBackend):
            wants = "triton package" if model.device.type == "cuda" else "C++ compiler"
            self._noted.append(f"attention: the slower reference is used: there is no {wants}")

    def of_part(self, model: LoadedModel, cache: KVCache) -> Forward:
        """A forward of some of the model's layers, by the attention that was settled on."""
        config = self._config
        if isinstance(self._backend, SdpaBackend):
            config = replace(config, attention="sdpa")
        part = Forward(config, model, cache)
        part._backend.warm_up()
        return part

    @property
    def attention(self) -> str:
        """The name of the attention that is active."""
        return "sdpa" if self._backend.failure else self._backend.name

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The parts that run in a slower way than was wanted, and why."""
        parts = (self._backend, self.graphs, self._model.fused)
        return (
            *self._noted,
            *(each.failure for each in parts if each is not None and each.failure),
        )

    def note_fallback(self, reason: str) -> None:
        """Add a reason to the fallbacks that is none of the forward's own."""
        self._noted.append(reason)

    def settle(self, check: Callable[[], None]) -> None:
        """Go on with the chosen forward and attention if `check`, which runs steps and raises
        ConfigError where they are wrong, finds nothing wrong with them on any rank; else with
        transformers' forward, and where that is not it with the reference of attention on all.

        Raises ConfigError where the reference is wrong too, and where the configuration leaves no
        choice."""
        # A rank may have no compiler: then none goes on with what the others have compiled.
        is_reference = isinstance(self._backend, SdpaBackend)
        if not self._all(not is_reference) and not is_reference:
            self._fall_back("another rank cannot compile the kernels")
        self._try_layers()
        error, fused = self._failure(check), self._model.fused
        if error is not None and fused is not None and not fused.failure:
            fused.give_up(error.message)
            error = self._failure(check)
        if error is not None:
            # What reproducible mode promises holds for the native kernels only.
            is_chosen = self._config.attention != "auto" or self._config.reproducible
            if is_chosen or isinstance(self._backend, SdpaBackend):
                raise error
            self._fall_back(error.message)
            error = self._failure(check)
            if error is not None:
                raise error
        self._backend.warm_up()
        if self._vote is not None:
            if not self._all(not self._backend.failure):
                self._fall_back(self._backend.failure or "another rank cannot run the kernels")
            self._backend.settle()

    def _failure(self, check: Callable[[], None]) -> ConfigError | None:
        """Why the check fails here or on another rank; None = on none."""
        error = None
        try:
            check()
        except ConfigError as raised:
            error = raised
        if self._all(error is None):
            return None
        return error or ConfigError("the check at load fails on another rank", param="model")

    def _try_layers(self) -> None:
        """Go on with our own layers for GPUs if all ranks have them, and can run them."""
        fused, failure = self._model.fused, ""
        if fused is not None:
            nobody = [padding(1, each) for each in self._cache.scratch_slots]
            failure = fused.failure_in(self._inputs(nobody))
        if not self._all(fused is not None and not failure) and fused is not None:
            fused.give_up(failure or "another rank cannot use ours")

    def _all(self, answer: bool) -> bool:
        return answer if self._vote is None else self._vote(answer)

    def _fall_back(self, reason: str) -> None:
        self._backend = SdpaBackend()
        self._noted.append(f"attention: the slower reference is used: {reason}")
        log.warning("%s", self._noted[-1])

    def use_graphs(self, capture: Capture | None, check: Callable[[], None]) -> None:
        """Go on with graphs, if there can be any and `check` finds nothing wrong with them on any
        rank.

        To be called after eager steps.  check: runs steps, raises ConfigError where they are
        wrong."""
        failure = ""
        try:
            self.graphs = create_graphs(
                self._config, self._model, self._cache, self._backend, self._all, capture
            )
        except RuntimeError as error:  # for want of memory
            failure = str(error)
        if not self._all(not failure):
            self.graphs = None
            reason = failure or "another rank has no memory for them"
            self._noted.append(f"steps run without CUDA graphs: {reason}")
            log.warning("%s", self._noted[-1])
        if self.graphs is not None:
            # Captured on something else first, so that the check sees replays.
            self.graphs.capture_ahead(MIN_ROWS)
            wrong = self._failure(check)
            if wrong is not None:
                self.graphs.give_up(wrong)

    def __call__(
        self, picks: Sequence[Pick], taps: tuple[int, ...] = (), drawn: Drawn | None = None
    ) -> StepOutputs:
        """Logits in the order of the picks, taps of their rows.  Raises WorkerError when the device
        fails, and OutOfMemoryError where a smaller step may have room.

        drawn: the picks' tokens, one of each, where the host does not know them."""
        num_rows = sum(pick.num_rows for pick in picks)
        if not num_rows:
            nothing = (0, self._model.num_columns)
            return StepOutputs(torch.empty(nothing, dtype=torch.float32, device=self._model.device))
        if self._reminder is not None:
            self._reminder.tick(lambda: self.fallbacks)
        width = num_rows if self.graphs is None else self.graphs.width(num_rows)
        first, *others = self._cache.scratch_slots
        batch = build_batch(
            picks,
            min_rows=max(self._min_rows, width),
            scratch_slot=first,
            max_context_len=self._model.max_context_len,
            taps=taps,
        )
        # One for each group of layers; they differ in nothing but slots.
        batches = [batch, *(batch.at(picks, *each) for each in enumerate(others, 1))]
        try:
            with torch.inference_mode():
                began = self._event()
                self._cache.settle()
                outputs, token_ids = None, None if drawn is None else _tokens(drawn, picks)
                if self.graphs is not None:
                    outputs = self.graphs(batches, token_ids)
                if outputs is None:
                    outputs = self._model.forward(self._inputs(batches, token_ids))
                ended = self._event()
                if began and ended:
                    outputs = replace(outputs, events=(began, ended))
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) and self._vote is None:
                raise  # other ranks would wait for this one's collectives
            raise WorkerError(f"the forward of {batch.num_rows} rows failed: {error}") from error
        return outputs

    def _event(self) -> torch.cuda.Event | None:
        if self._model.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._model.device))
        return event

    def timed(self, step: StepSummary, events: Events | None) -> StepSummary:
        """The summary of a step with the times of the GPU, once it is done, in place of those of
        the launches; of a CPU as it is.  Raises WorkerError when the device fails."""
        if events is None:
            return step
        began, ended = events
        try:
            # The whole device must not be waited for while another thread captures.
            ended.synchronize()
            time_s = 1e-3 * began.elapsed_time(ended)
        except RuntimeError as error:
            raise WorkerError(f"the forward of {step.num_rows} rows failed: {error}") from error
        rest_s = step.step_time_s - step.forward_time_s
        return replace(step, forward_time_s=time_s, step_time_s=rest_s + time_s)

    def _inputs(
        self, batches: Sequence[Batch], known_ids: torch.Tensor | None = None
    ) -> StepInputs:
        """Of an eager step.  known_ids: of the first rows, in place of the batch's."""
        batch = batches[0]
        token_ids = self._on_device(batch.token_ids)
        if known_ids is not None:
            token_ids[: len(known_ids)] = known_ids
        plan = AttentionStep(
            self._cache,
            self._model.layers,
            list(map(self._backend.plan, batches, self._cache.scratch_slots)),
            [self._on_device(each.slots) for each in batches],
            [
                self._on_device(each.path_slots(group.kernel)) if group.kernel else None
                for each, group in zip(batches, self._cache.groups, strict=True)
            ],
            self._pieces(batches),
        )
        return StepInputs(
            token_ids,
            self._on_device(batch.positions),
            self._on_device(batch.logit_rows),
            plan,
            batch.taps,
            None if batch.adapters is None else self._on_device(batch.adapters),
        )

    def _pieces(self, batches: Sequence[Batch]) -> list[Piece]:
        """The rows for the group whose layers have states, where there is one."""
        groups = zip(batches, self._cache.groups, self._cache.scratch_slots, strict=True)
        for batch, group, scratch_slot in groups:
            if any(layer.state for layer in group.layers):
                return pieces_of(batch, scratch_slot, self._model.device)
        return []

    def _on_device(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return sent(array, self._model.device)


def _tokens(drawn: Drawn, picks: Sequence[Pick]) -> torch.Tensor:
    """The picks' tokens, int32[picks]; any token where none was drawn."""
    rows = np.array([drawn.rows[pick.work.request_id] for pick in picks])
    return drawn.token_ids[sent(rows, drawn.token_ids.device)].clamp_(min=0)
