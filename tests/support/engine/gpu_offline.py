"""Compiles the Triton kernels for GPUs that are not here, as serving would launch them.

    python -m tests.support.engine.gpu_offline          every variant (`make check-gpu-offline`)
    python -m tests.support.engine.gpu_offline --few    one or two of each architecture

A line for each variant on stdout; it exits with 1 if one does not compile, or takes more shared
memory than the architecture has.  Triton keeps what it has compiled (TRITON_CACHE_DIR).
"""

from __future__ import annotations

import itertools
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from cluster.records import frozen

# Bytes of shared memory that one program may have, by compute capability.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
_BLOCK_LINES = (16, 32, 64)
_HEAD_DIMS = (64, 96, 128, 256)
_DTYPES = (torch.bfloat16, torch.float32)
_SHARING = 4
_WARP = 32
_TRITON_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@frozen
class Variant:
    """Of the attention's kernels; windows, trees and caps are all on, the most there can be."""

    capability: int
    block_lines: int
    head_dim: int
    sinks: bool
    dtype: torch.dtype


ALL = [
    Variant(*each)
    for each in itertools.product(SHARED_BYTES, _BLOCK_LINES, _HEAD_DIMS, (False, True), _DTYPES)
]
FEW = [
    Variant(80, 64, 256, True, torch.float32),
    Variant(80, 16, 128, False, torch.bfloat16),
    Variant(90, 64, 128, False, torch.bfloat16),
    Variant(100, 32, 64, True, torch.bfloat16),
]


def compile_attention(variant: Variant) -> tuple[Variant, int, str]:
    """(the variant, bytes of shared memory, what went wrong)."""
    from cluster.engine.attention.triton.backend import Shape
    from cluster.engine.attention.triton.kernels import attend_kernel, combine_kernel

    shape = Shape(2 * _SHARING, 2, variant.head_dim, variant.dtype, torch.device("cpu"))
    common = shape.constants(variant.block_lines, sinks=variant.sinks)
    own = {"WINDOW": 64, "TREES": True, "CAPPED": True, **shape.attend_constants()}
    floats = _TRITON_NAMES[variant.dtype]
    pointers = dict.fromkeys(("query", "kv", "output", "sinks"), floats)
    pointers |= {"partials": "fp32", "partial_lse": "fp32", "layout": "i32"}
    shared = 0
    try:
        for kernel, constants in ((attend_kernel, common | own), (combine_kernel, common)):
            code = _compiled(kernel, constants, pointers, variant.capability)
            shared = max(shared, int(code.metadata.shared))
    except Exception as error:  # noqa: BLE001 - whatever the compiler does is what is looked for
        return variant, shared, f"{type(error).__name__}: {error}".splitlines()[0]
    most = SHARED_BYTES[variant.capability]
    return variant, shared, "" if shared <= most else f"more than {most} bytes of shared memory"


def compile_draw(capability: int) -> None:
    """Both forms of the draw; raises what Triton does."""
    from cluster.engine.draw.triton import draw_kernel

    words = ("best_tokens", "seeds", "positions", "streams")
    numbers = ("logits", "maxima", "temperatures", "cutoffs", "best_scores")
    pointers = dict.fromkeys(words, "i64") | dict.fromkeys(numbers, "fp32")
    for truncated in (False, True):
        constants = {"TRUNCATED": truncated, "BLOCK": 1024}
        _compiled(draw_kernel, constants, pointers, capability)


def _compiled(
    kernel: Any, constants: dict[str, Any], pointers: dict[str, str], capability: int
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = f"*{pointers[name]}"
        else:
            signature[name] = "fp32" if name in ("scaling", "softcap") else "i32"
    source = ASTSource(kernel, signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, _WARP))


def main(variants: list[Variant]) -> int:
    num_failed = 0
    for capability in sorted({each.capability for each in variants}):
        compile_draw(capability)
        sys.stdout.write(f"sm_{capability} draws compile\n")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for each, shared, problem in pool.map(compile_attention, variants):
            num_failed += bool(problem)
            sys.stdout.write(
                f"sm_{each.capability} M={each.block_lines} head_dim={each.head_dim} "
                f"sinks={each.sinks} {_TRITON_NAMES[each.dtype]} shared={shared} "
                f"{problem or 'compiles'}\n"
            )
            sys.stdout.flush()
    sys.stdout.write(f"{len(variants)} variants, {num_failed} failed\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(FEW if "--few" in sys.argv[1:] else ALL))
