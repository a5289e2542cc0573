"""The model's forward as CUDA graphs, one for each of a few widths of a step.

An eager step of a transformers model launches hundreds of kernels from Python, which takes a GPU
longer to be told than to do.  A graph is told once.  It fixes addresses and launch grids, so a step
is padded to a width that has one, everything it needs is written to the same words on the device,
in one copy, and the sections of the attention's layout have room for any batch of that width
(`Frame` of attention/triton/layout.py).  What is captured is the forward of eager steps itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch

from cluster.config.schema import EngineConfig
from cluster.engine.attention.seam import AttentionBackend, AttentionStep, StepForm
from cluster.engine.graphs.capture import Capture, CudaCapture, Replay, Staging
from cluster.engine.loading.model import LoadedModel
from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.paths import StepInputs, StepOutputs
from cluster.engine.reminder import in_a_line
from cluster.engine.schedule.batch import Batch, padding
from cluster.engine.types import LayerSpec, Vote
from cluster.errors import ConfigError

log = logging.getLogger(__name__)

# Rows of a step that has a graph: texts that decode, also beside a chunk of a prompt.  Wider ones
# compute for longer than their launches take.
WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
# Of them the rows with logits, of which a chunk has one: a vocabulary of 128,256 takes half a
# megabyte of each, several times over.
LOGIT_ROWS = 256
# token_ids, positions, slots, logit_rows: an int64 for each row; behind them its `path_slots`, at
# least as many as the model's longest convolution reads.
_NUM_INDICES = 4
_WORDS_PER_INDEX = 2

# Slots and trees of a step, 16 MiB of them at most; where a step has more it runs eagerly.
_MAX_REST_WORDS = 2**22
# Words of one sequence's tree; 128 nodes take three quarters of them.
_TREE_WORDS = 1024


class GraphedForward:
    """Steps of a model as graphs, each captured when its form is first met; one thread at a time.

    Steps that ask for taps have graphs of their own, by the taps they ask for, which write to a
    static buffer as others do with their logits.  Where anything goes wrong with capturing, a
    warning says so once and every step runs eagerly.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        backend: AttentionBackend,
        capture: Capture,
        *,
        widths: tuple[int, ...],
        rest_words: int,
        vote: Vote,
    ) -> None:
        """widths: ascending.  rest_words: of slots and trees, that a step may have.  vote: of the
        ranks, which capture the same steps in the same order: a graph holds collectives."""
        self.failure = ""  # why steps run eagerly that could replay graphs; "" = they do not
        self._model = model
        self._cache = cache
        self._backend = backend
        self._capture = capture
        self._vote = vote
        self._widths = widths
        # Rounded up, so that what stands behind the indices is aligned for Triton's loads.
        self._kernel = -(-max(group.kernel for group in cache.groups) // 4) * 4
        self._replays: dict[tuple[StepForm, tuple[int, ...]], Replay] = {}
        self._taps: dict[tuple[int, ...], torch.Tensor] = {}
        widest = backend.form(widths[-1], widths[-1])
        assert widest is not None, "the backend knows no form of this model's steps"
        nobody = self._padding(widths[-1])
        fixed = self._num_index_words(widths[-1]) + widest.num_words(nobody[0])
        # One for each group of layers, whose slots are others.
        self._stagings = [Staging(fixed + rest_words, model.device) for _ in nobody]
        # Outside the pool: one result may be read while no graph may have it overwritten.
        shape = min(widths[-1], LOGIT_ROWS), model.num_columns
        self._logits = torch.zeros(shape, dtype=torch.float32, device=model.device)

    @property
    def num_graphs(self) -> int:
        return len(self._replays)

    def width(self, num_rows: int) -> int:
        """The number of rows to pad a step of so many to; the same where it has no graph."""
        fitting = () if self.failure else (each for each in self._widths if each >= num_rows)
        return next(iter(fitting), num_rows)

    def __call__(
        self, batches: Sequence[Batch], token_ids: torch.Tensor | None = None
    ) -> StepOutputs | None:
        """The caller's own tensors; None: run the step eagerly.

        batches: of each group of layers one, padded to its `width`.  token_ids: of the first rows,
        on the device, in place of the batch's.  Call in inference mode.  Raises RuntimeError when
        the device fails."""
        batch = batches[0]
        if (
            self.failure
            or batch.adapters is not None
            or batch.num_rows not in self._widths
            or len(batch.logit_rows) > len(self._logits)
        ):
            return None
        max_rows = max((share.num_rows for share in batch.shares), default=1)
        form = self._backend.form(batch.num_rows, max_rows)
        if form is None or not self._stage(batches, form):
            return None
        taps = batch.taps
        replay = self._replays.get((form, taps)) or self._captured(form, batch.num_rows, taps)
        if replay is None:
            return None
        if token_ids is not None:
            words = self._stagings[0].words[: self._num_index_words(batch.num_rows)]
            words.view(torch.int64)[: len(token_ids)] = token_ids
        replay()
        logits = self._logits[: len(batch.logit_rows)].clone()
        return StepOutputs(logits, self._taps[taps][: batch.num_rows].clone() if taps else None)

    def capture_ahead(self, max_width: int = WIDTHS[-1], taps: tuple[int, ...] = ()) -> None:
        """Capture every form of up to so many rows now, on padding: it writes to the scratch slot
        alone.  taps: that the steps to come ask for.

        The widest comes first: what it leaves in the pool is enough for the others, while blocks of
        narrower ones are too small for it."""
        with torch.inference_mode():
            for width in (each for each in reversed(self._widths) if each <= max_width):
                for max_rows in (each for each in self._widths if each <= width):
                    form = self._backend.form(width, max_rows)
                    if self.failure or form is None:
                        return
                    is_known = (form, taps) in self._replays
                    if not is_known and self._stage(self._padding(width), form):
                        self._captured(form, width, taps)
        log.info("graphs captured max_width=%d graphs=%d", max_width, self.num_graphs)

    def _stage(self, batches: Sequence[Batch], form: StepForm) -> bool:
        """Bring the batches to the device; False: they have too many words."""
        first = batches[0]
        start = self._num_index_words(first.num_rows)
        num_words = start + form.num_words(first)  # of all alike
        if num_words > len(self._stagings[0].words):
            return False
        for batch, staging in zip(batches, self._stagings, strict=True):
            area = staging.area()
            indices = area[:start].view(np.int64).reshape(_NUM_INDICES + self._kernel, -1)
            indices[0], indices[1], indices[2] = batch.token_ids, batch.positions, batch.slots
            indices[3] = 0
            indices[3, : len(batch.logit_rows)] = batch.logit_rows
            if self._kernel:
                indices[_NUM_INDICES:] = batch.path_slots(self._kernel).T
            form.lay_out(batch, area[start:])
            staging.send(num_words)
        return True

    def _captured(self, form: StepForm, width: int, taps: tuple[int, ...]) -> Replay | None:
        replay, error = None, None
        try:
            replay = self._capture(self._run(form, width, taps))
        except Exception as failure:  # noqa: BLE001 - a model's own code may do what no graph can
            error = failure
        if not self._vote(replay is not None):
            self.give_up(error or ConfigError("another rank cannot capture them"))
            return None
        assert replay is not None, "the vote counts this rank's answer"
        self._replays[form, taps] = replay
        return replay

    def _run(self, form: StepForm, width: int, taps: tuple[int, ...]) -> Callable[[], None]:
        """The forward of a staged step; it knows the words on the device, and no batch."""
        start = self._num_index_words(width)
        staged = [staging.words for staging in self._stagings]
        indices = [words[:start].view(torch.int64).view(-1, width) for words in staged]
        logits = self._logits[:width]
        token_ids, positions, _, logit_rows = indices[0][:_NUM_INDICES]
        plan = AttentionStep(
            self._cache,
            self._model.layers,
            [form.plan(words[start:]) for words in staged],
            [each[2] for each in indices],
            [each[_NUM_INDICES:].T for each in indices],
        )
        inputs = StepInputs(token_ids, positions, logit_rows[: len(logits)], plan, taps)

        def run() -> None:
            outputs = self._model.forward(inputs)
            logits.copy_(outputs.logits)
            states = outputs.taps
            if states is not None:
                if taps not in self._taps:  # by the run before the first capture
                    self._taps[taps] = states.new_zeros(self._widths[-1], *states.shape[1:])
                self._taps[taps][:width].copy_(states)

        return run

    def give_up(self, error: Exception) -> None:
        self.failure = f"steps run without CUDA graphs: {in_a_line(error)}"
        log.warning("%s", self.failure)
        self._replays.clear()  # and with them their memory
        self._taps.clear()

    def _num_index_words(self, width: int) -> int:
        return width * (_NUM_INDICES + self._kernel) * _WORDS_PER_INDEX

    def _padding(self, width: int) -> list[Batch]:
        """A step of nobody, of each group of layers."""
        return [padding(width, scratch_slot) for scratch_slot in self._cache.scratch_slots]


def create_graphs(
    config: EngineConfig,
    model: LoadedModel,
    cache: KVCache,
    backend: AttentionBackend,
    vote: Vote,
    capture: Capture | None = None,
) -> GraphedForward | None:
    """None where there can be no graphs.

    To be called after eager steps, in which the backend has met all layers.  vote: see
    `GraphedForward`.  capture: as a machine without a GPU has it; None: CUDA's.
    """
    if not may_have_graphs(config, model.layers) or (capture is None and not is_on_one_gpu(model)):
        return None
    widths = tuple(width for width in WIDTHS if width <= config.max_batch_tokens)
    if backend.form(widths[-1], widths[-1]) is None:
        return None
    each = model.max_context_len + _TREE_WORDS
    rest_words = min(config.max_running_sequences * each, _MAX_REST_WORDS)
    return GraphedForward(
        model,
        cache,
        backend,
        capture or CudaCapture(model.device),
        widths=widths,
        rest_words=rest_words,
        vote=vote,
    )


def may_have_graphs(config: EngineConfig, layers: Sequence[LayerSpec]) -> bool:
    """Whether steps on a GPU can run in graphs, by configuration and model."""
    # The pieces of a step of layers with states have other sizes each time.
    return config.cuda_graphs and not any(layer.state for layer in layers)


def is_on_one_gpu(model: LoadedModel) -> bool:
    """True if all of the rank's model is where its inputs go, and that is a GPU."""
    if model.device.type != "cuda":
        return False
    devices = {parameter.device for parameter in model.module.parameters()}
    devices.update(buffer.device for buffer in model.module.buffers())
    return devices == {model.device}
