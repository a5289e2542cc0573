"""Our kernels compiled as they would be served, and what the machine code says of their speed.

The attributes that Triton's compiler works with come from real launches (`launches.py`): without
them it compiles what no GPU runs.  Registers and stack are read by `cuobjdump`, instructions by
`nvdisasm`, which are part of the triton wheel.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton

from cluster.engine.attention.triton.backend import Shape, TritonForm
from cluster.engine.attention.triton.layout import Frame
from cluster.engine.draw.triton import draw_tokens
from cluster.engine.fused.kernels import add_norm, rotate, silu_product
from cluster.engine.types import AttentionOptions
from cluster.records import frozen
from tests.support.gpu.launches import Launch, launches
from tests.support.gpu.models import CONFIGS, Attending, Between

# Bytes of shared memory that one program may have, and multiprocessors, by compute capability:
# A100, H100, B200.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
_PROCESSORS = {80: 108, 90: 132, 100: 148}
_PROGRAMS_PER_PROCESSOR = 2  # as the backend has it
_SLOTS = 64
# Beside what models have: numbers of full precision, caps (Gemma 2), heads of 96.
_MORE = (
    Attending(32, 8, 128, None, sinks=False, dtype=torch.float32),
    Attending(32, 32, 96, None, sinks=False),
    Attending(16, 8, 256, 4096, sinks=False, softcap=50.0),
)

Counts = Mapping[str, int]


@frozen
class Variant:
    """Launches of one step.  own: None = of the draw.  truncated: that some law of it is."""

    capability: int
    own: Attending | Between | None
    block_lines: int = 0
    truncated: bool = False

    @property
    def name(self) -> str:
        own = self.own
        if own is None:
            return f"sm_{self.capability} {'truncated' if self.truncated else 'plain'}"
        if isinstance(own, Between):
            return (
                f"sm_{self.capability} size={own.size} inner={own.inner_size} "
                f"head_dim={own.head_dim} sharing={own.heads // own.kv_heads}"
                f"{' norms' if own.norms else ''}"
            )
        window = f" window={own.window}" if own.window else ""
        capped = " capped" if own.softcap else ""
        return (
            f"sm_{self.capability} {str(own.dtype).removeprefix('torch.')} head_dim={own.head_dim} "
            f"sharing={own.heads // own.kv_heads} lines={self.block_lines}{window}{capped}"
            f"{' sinks' if own.sinks else ''}"
        )

    def launches(self) -> list[Launch]:
        """As a step on such a GPU makes them."""
        with launches(self.capability) as found:
            if self.own is None:
                _draw(truncated=self.truncated)
            elif isinstance(self.own, Between):
                _between(self.own)
            else:
                _attend(self.own, self.block_lines, self.capability)
        return found


def variants() -> list[Variant]:
    """What the models' steps launch on each GPU.

    Of the first kind of layer everything; of others their least and most lines; of what no
    listed model has, the most alone."""
    kinds = dict.fromkeys(each for name in CONFIGS for each in Attending.of(name))
    found: dict[str, Variant] = {}
    for capability in SHARED_BYTES:
        for index, own in enumerate((*kinds, *_MORE)):
            lines = _shape(own).all_block_lines
            if index:
                lines = lines[-1:] if own in _MORE else [lines[0], lines[-1]]
            for block_lines in lines:
                each = Variant(capability, own, block_lines)
                # Heads are the grid; what is compiled knows how many share a key head.
                found.setdefault(each.name, each)
        for truncated in (False, True):
            draw = Variant(capability, None, truncated=truncated)
            found[draw.name] = draw
        for between in (each for name in CONFIGS for each in Between.of(name)):
            variant = Variant(capability, between)
            found[variant.name] = variant
    return list(found.values())


def measured(given: Iterable[Variant]) -> dict[str, Counts]:
    """The counts of each kernel, by its name and the variant's; raises what the compiler does."""
    # Spawned: this process may have threads, whose locks a fork would keep.
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(of_variant, given))
    return {name: counts for each in found for name, counts in each.items()}


def faults(found: Mapping[str, Counts]) -> Iterator[str]:
    """What is wrong with these kernels, whatever the table says."""
    for name, counts in found.items():
        capability, *dims = map(int, re.findall(r"(?:sm_|head_dim=)(\d+)", name))
        if counts["shared"] > SHARED_BYTES[capability]:
            yield f"{name}: {counts['shared']} bytes of shared memory are too many"
        # What is served where nothing is configured, of the usual heads.
        if "float32" in name or any(not 64 <= each <= 128 for each in dims):
            continue
        if counts["stack"] or counts["spills"]:
            yield f"{name}: {counts['spills']} instructions spill to {counts['stack']} bytes"
        if name.startswith("attend_kernel") and not (counts["wide"] and counts["mma"]):
            yield f"{name}: no loads of 128 bits, or no tensor cores"
        if name.startswith(("add_norm_kernel", "silu_kernel")) and not counts["wide"]:
            yield f"{name}: no loads of 128 bits"


def of_variant(variant: Variant) -> dict[str, Counts]:
    """The counts of each kernel of a variant."""
    return {
        f"{each.name} {variant.name}{_asked(each)}": counts(each.compiled(variant.capability))
        for each in variant.launches()
    }


def _asked(launch: Launch) -> str:
    """What several launches of one kernel in a step differ in."""
    names = {launch.kernel.arg_names[at]: value for (at,), value in launch.constants.items()}
    flags = (name for name in ("ADDS", "CHOOSES") if names.get(name))
    return "".join(f" {name.lower()}" for name in flags)


def counts(compiled: Any) -> Counts:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = _said("cuobjdump", "--dump-resource-usage", str(path))
        code = _said("nvdisasm", "-c", str(path))
    numbers = dict(re.findall(r"\b(REG|STACK):(\d+)", usage))
    words = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ +)?([A-Z][\w.]*)", code, re.MULTILINE)
    assert words, "the disassembler names no instruction"
    return {
        "registers": int(numbers["REG"]),
        "stack": int(numbers["STACK"]),
        "shared": int(compiled.metadata.shared),
        "spills": _num(words, r"(LDL|STL)\b"),
        # From memory to registers, or past them to shared memory.
        "wide": _num(words, r"(LDG|LDGSTS)\b.*\b128\b|UTMALDG|UBLKCP"),
        # Of Ampere, Hopper and Blackwell.
        "mma": _num(words, r"(HMMA|HGMMA|UTCHMMA)\b"),
    }


def _num(words: Iterable[str], pattern: str) -> int:
    return sum(re.match(pattern, each) is not None for each in words)


def _said(tool: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _shape(own: Attending) -> Shape:
    return Shape(own.heads, own.kv_heads, own.head_dim, own.dtype, torch.device("cpu"))


def _attend(own: Attending, block_lines: int, capability: int) -> None:
    """A step of eight rows in a layer behind the first."""
    shape, num_rows = _shape(own), 8
    tiling = shape.tiling(block_lines, _PROCESSORS[capability] * _PROGRAMS_PER_PROCESSOR)
    frame = Frame.holding(num_rows, tiling)
    words = torch.zeros(frame.rest, dtype=torch.int32)
    plan = TritonForm(shape, block_lines, tiling, frame).plan(words)
    # As transformers' layers hand them over, and as the engine's cache holds them.
    query = torch.zeros(num_rows, own.heads, own.head_dim, dtype=own.dtype).transpose(0, 1)
    kv = torch.zeros(2, _SLOTS, 2, own.kv_heads, own.head_dim, dtype=own.dtype)[1]
    sinks = torch.zeros(own.heads, dtype=own.dtype) if own.sinks else None
    plan.attend(query, kv, own.window, AttentionOptions(own.head_dim**-0.5, own.softcap, sinks))


def _between(own: Between) -> None:
    """The first norm of a step, that of a layer behind it, and the last, of some rows."""
    rows, num_heads = 8, own.heads + 2 * own.kv_heads
    hidden = torch.zeros(rows, own.size, dtype=own.dtype)
    indices = torch.zeros(rows, dtype=torch.int64)
    add_norm(hidden, None, hidden[0], 1e-5)
    add_norm(hidden, hidden, hidden[0], 1e-5)
    add_norm(hidden, hidden, hidden[0], 1e-5, indices)
    qkv = torch.zeros(rows, num_heads, own.head_dim, dtype=own.dtype)
    kv = torch.zeros(2, _SLOTS, 2, own.kv_heads, own.head_dim, dtype=own.dtype)[1]
    rotations = torch.zeros(2, 1024, own.head_dim // 2, dtype=own.dtype)
    norms = torch.zeros(2 * own.head_dim, dtype=own.dtype) if own.norms else None
    rotate(qkv, kv, indices, indices, rotations, norms, 1e-5 if own.norms else 0.0)
    silu_product(torch.zeros(rows, 2 * own.inner_size, dtype=own.dtype))


def _draw(*, truncated: bool) -> None:
    ones, keys = torch.ones(4), torch.zeros((3, 4), dtype=torch.int64)
    # The vocabulary of Llama 3.
    logits = torch.zeros(len(ones), 128_256)
    draw_tokens(logits, ones, ones, ones if truncated else None, keys)
