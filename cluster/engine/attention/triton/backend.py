"""The GPU backend: tree attention over paged keys by Triton kernels.

What a step's layers share is laid out once on the host and copied to each device in one transfer.
Layers the kernels do not serve (on a CPU, or with heads wider than 256) are attended by the
reference, `cluster.engine.attention.sdpa`, which is also the oracle of the tests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from triton import knobs

from cluster.engine.attention.sdpa import SdpaPlan
from cluster.engine.attention.seam import AttentionBackend, AttentionPlan, Words
from cluster.engine.attention.triton.kernels import attend_kernel, combine_kernel
from cluster.engine.attention.triton.layout import Frame, Tiling, lay_out, num_words
from cluster.engine.launch import LAUNCH_ERRORS, KernelHealth, on_device
from cluster.engine.schedule.batch import Batch, padding
from cluster.engine.types import AttentionOptions
from cluster.errors import ConfigError
from cluster.records import frozen, record

_MAX_HEAD_DIM = 256
# Tensor cores multiply tiles of at least 16 lines; more than 64 of wide heads overflow the
# registers, and so do 64 on an A100 and a B200 where only four warps hold them.
_MIN_LINES, _MAX_LINES = 16, 64
# Bytes of one block of keys: with its values, and one block in flight, it fits the shared memory of
# every GPU since Ampere.
_BLOCK_BYTES = 16 * 1024
_MIN_BLOCK_KEYS, _MAX_BLOCK_KEYS = 16, 64
# Enough programs per multiprocessor that some compute while others wait for memory.
_PROGRAMS_PER_PROCESSOR = 2
# Without a GPU (the interpreter) nothing is gained by splitting.
_PROGRAMS_WITHOUT_GPU = 1


@frozen
class Shape:
    """The layout's dependence besides the batch: one layer's heads and where they are."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, query: torch.Tensor, kv: torch.Tensor) -> Shape:
        return cls(query.shape[0], kv.shape[2], query.shape[2], query.dtype, query.device)

    @property
    def sharing(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def block_dim(self) -> int:
        return max(16, _power_of_two(self.head_dim))

    @property
    def block_keys(self) -> int:
        fitting = _BLOCK_BYTES // (self.block_dim * self.dtype.itemsize)
        return min(max(fitting, _MIN_BLOCK_KEYS), _MAX_BLOCK_KEYS)

    def block_lines(self, max_rows: int) -> int:
        """Lines (rows times query heads) of a tile, for shares of up to `max_rows` rows."""
        wanted = min(_power_of_two(max_rows * self.sharing), _MAX_LINES)
        return max(self._fewest_lines, wanted)

    @property
    def all_block_lines(self) -> list[int]:
        """All values that `block_lines` may return."""
        fewest = self._fewest_lines
        doubled = range((max(fewest, _MAX_LINES) // fewest).bit_length())
        return [fewest << times for times in doubled]

    @property
    def _fewest_lines(self) -> int:
        return max(_MIN_LINES, _power_of_two(self.sharing))

    def tiling(self, block_lines: int, num_programs: int | None) -> Tiling:
        return Tiling(
            rows_per_tile=block_lines // self.sharing,
            block_keys=self.block_keys,
            num_kv_heads=self.kv_heads,
            num_programs=num_programs or _busy_programs(self.device),
        )


# A layer's shape, its window, whether its scores are capped, whether it has sinks.
_Variant = tuple[Shape, int | None, bool, bool]


@frozen
class TritonForm:
    """A `StepForm` of this backend."""

    shape: Shape
    block_lines: int
    tiling: Tiling
    frame: Frame

    def num_words(self, batch: Batch) -> int:
        return num_words(batch, self.frame)

    def lay_out(self, batch: Batch, out: Words) -> None:
        lay_out(batch, self.tiling, self.frame, out)

    def plan(self, words: torch.Tensor) -> AttentionPlan:
        return _FormPlan(self, words)


@record
class _FormPlan:
    """Attends by whatever the words say when the kernels run, in layers of the form's shape."""

    form: TritonForm
    words: torch.Tensor

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, window: int | None, options: AttentionOptions
    ) -> torch.Tensor:
        shape, frame, words = self.form.shape, self.form.frame, self.words
        block_lines = self.form.block_lines
        if query.stride(2) != 1:
            query = query.contiguous()
        output = query.new_empty(query.shape[1], shape.heads, shape.head_dim)
        partials_shape = (frame.num_partials, shape.kv_heads, block_lines)
        lse = torch.empty(partials_shape, dtype=torch.float32, device=query.device)
        partials = torch.empty(
            (*partials_shape, shape.head_dim), dtype=torch.float32, device=query.device
        )
        sinks = output if options.sinks is None else options.sinks
        common: dict[str, Any] = {
            "HEAD_DIM": shape.head_dim,
            "SHARING": shape.sharing,
            "SINKS": options.sinks is not None,
            "BLOCK_M": block_lines,
            "BLOCK_D": shape.block_dim,
        }
        with on_device(shape.device):
            attend_kernel[(frame.num_items, shape.kv_heads)](
                query,
                kv,
                output,
                partials,
                lse,
                sinks,
                words,
                frame.tiles,
                frame.positions,
                query.stride(0),
                query.stride(1),
                kv.stride(0),
                kv.stride(1),
                kv.stride(2),
                options.scaling,
                options.softcap or 1.0,
                WINDOW=window or 0,
                CAPPED=options.softcap is not None,
                BLOCK_N=shape.block_keys,
                # Tensor cores would round float32 to 10 bits of mantissa.
                PRECISION="ieee" if shape.dtype == torch.float32 else "tf32",
                num_warps=max(4, block_lines // 8),
                **common,
            )
            if frame.num_split_rows:
                combine_kernel[(frame.num_split_rows, shape.kv_heads, shape.sharing)](
                    output, partials, lse, sinks, words, frame.tiles, frame.split_rows, **common
                )
        return output


class TritonPlan:
    """One step's layouts, made when a layer first needs them; most models need one."""

    def __init__(self, batch: Batch, scratch_slot: int, backend: TritonBackend) -> None:
        self._batch = batch
        self._backend = backend
        self._max_rows = max((share.num_rows for share in batch.shares), default=1)
        self._reference = SdpaPlan(batch, scratch_slot)
        self._plans: dict[Shape, AttentionPlan] = {}

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, window: int | None, options: AttentionOptions
    ) -> torch.Tensor:
        shape = Shape.of(query, kv)
        self._backend.note(shape, kv, window, options)
        if self._backend.serves(shape):
            if shape not in self._plans:
                self._plans[shape] = self._plan(shape)
            try:
                return self._plans[shape].attend(query, kv, window, options)
            except LAUNCH_ERRORS as error:
                self._backend.health.fail(error)
        return self._reference.attend(query, kv, window, options)

    def _plan(self, shape: Shape) -> AttentionPlan:
        block_lines = shape.block_lines(self._max_rows)
        tiling = shape.tiling(block_lines, self._backend.num_programs)
        layout = lay_out(self._batch, tiling)
        words = torch.from_numpy(layout.words)
        if shape.device.type == "cuda":
            # From pinned memory the copy joins the stream instead of stopping the host.
            words = words.pin_memory().to(shape.device, non_blocking=True)
        return TritonForm(shape, block_lines, tiling, layout.frame).plan(words)


class TritonBackend(AttentionBackend):
    """Makes TritonPlans.

    num_programs: into how many the keys of a step are cut, None = as the device needs.
    Raises ConfigError where no device could run them.
    """

    name = "triton"

    def __init__(self, num_programs: int | None = None) -> None:
        if not torch.cuda.is_available() and not knobs.runtime.interpret:
            raise ConfigError(
                "attention triton needs an NVIDIA GPU; use auto or sdpa", param="attention"
            )
        self.num_programs = num_programs
        self.health = KernelHealth("attention")
        # Of the layers that have attended so far, by what the kernels are compiled for besides
        # tiles: an example of each, its cache and its arithmetic.
        self._met: dict[_Variant, tuple[torch.Tensor, AttentionOptions]] = {}

    @property
    def failure(self) -> str:
        return self.health.failure

    def settle(self) -> None:
        self.health.settle()

    def plan(self, batch: Batch, scratch_slot: int) -> TritonPlan:
        return TritonPlan(batch, scratch_slot, self)

    def note(
        self, shape: Shape, kv: torch.Tensor, window: int | None, options: AttentionOptions
    ) -> None:
        """Take note of a layer that attends, for `warm_up` and `form`."""
        variant = shape, window, options.softcap is not None, options.sinks is not None
        self._met.setdefault(variant, (kv, options))

    def serves(self, shape: Shape) -> bool:
        """True if the kernels do; else the reference does."""
        if shape.head_dim > _MAX_HEAD_DIM or self.failure:
            return False
        # The interpreter multiplies bfloat16 as if its bits were integers.
        return shape.device.type == "cuda" or (
            bool(knobs.runtime.interpret) and shape.dtype != torch.bfloat16
        )

    def warm_up(self) -> None:
        """Compile and load every kernel that later steps can meet; to be called after a step, in
        which all layers have attended.  They attend to nobody: only padding is laid out."""
        try:
            for (shape, window, *_), (kv, options) in self._met.items():
                for block_lines in shape.all_block_lines:
                    if self.serves(shape):
                        self._try(shape, block_lines, kv, window, options)
        except LAUNCH_ERRORS as error:
            self.health.fail(error)

    def _try(
        self,
        shape: Shape,
        block_lines: int,
        kv: torch.Tensor,
        window: int | None,
        options: AttentionOptions,
    ) -> None:
        tiling = shape.tiling(block_lines, self.num_programs)
        frame = Frame.holding(1, tiling)
        # Each kernel must be met: where a frame has no room for splits, one of nobody's rows.
        frame = replace(frame, num_split_rows=max(frame.num_split_rows, 1))
        layout = lay_out(padding(1), tiling, frame)
        words = torch.from_numpy(layout.words).to(shape.device)
        # As transformers' layers hand it over: a row's heads side by side.
        rows = torch.zeros((1, shape.heads, shape.head_dim), dtype=shape.dtype, device=shape.device)
        plan = TritonForm(shape, block_lines, tiling, frame).plan(words)
        plan.attend(rows.transpose(0, 1), kv, window, options)

    def form(self, num_rows: int, max_rows: int) -> TritonForm | None:
        """None before the first step, and for models whose layers differ in their heads or are not
        all served by the kernels."""
        shapes = {shape for shape, *_ in self._met}
        if len(shapes) != 1:
            return None
        (shape,) = shapes
        if not self.serves(shape):
            return None
        block_lines = shape.block_lines(max_rows)
        tiling = shape.tiling(block_lines, self.num_programs)
        return TritonForm(shape, block_lines, tiling, Frame.holding(num_rows, tiling))


def _busy_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS_WITHOUT_GPU
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count) * _PROGRAMS_PER_PROCESSOR


def _power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return int(triton.next_power_of_2(number))
