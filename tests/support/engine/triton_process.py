"""What the tests of the Triton kernels need a process of its own for.

    TRITON_INTERPRET=1 python -m tests.support.engine.triton_process attend OUT  every output
    TRITON_INTERPRET=1 python -m tests.support.engine.triton_process draw OUT    every token
    python -m tests.support.engine.triton_process compile 90                 machine code for sm_90

Triton decides at its first import whether functions are compiled or interpreted.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch


def attend(path: str) -> None:
    """Save {case: [rows, heads, head_dim]}, and where it has a form, the same attended in that."""
    from cluster.engine.attention.triton.backend import TritonBackend
    from tests.support.engine.triton_cases import CASES, SCRATCH_SLOT

    found = {}
    for name, case in CASES.items():
        batch, backend = case.batch, TritonBackend(case.num_programs)
        tensors = case.query(), case.kv(), case.window, case.options()
        found[name] = backend.plan(batch, SCRATCH_SLOT).attend(*tensors)
        form = backend.form(batch.num_rows, max(share.num_rows for share in batch.shares))
        if form is not None:
            # What an earlier step left behind must do nothing.
            words = np.full(form.num_words(batch) + 64, 77_777, np.int32)
            form.lay_out(batch, words)
            plan = form.plan(torch.from_numpy(words))
            found[f"{name}, in a form"] = plan.attend(*tensors)
    torch.save(found, path)


def draw(path: str) -> None:
    """Save {case: int64[rows]}."""
    from cluster.engine.draw.triton import draw_tokens
    from tests.support.engine.triton_cases import DRAWS

    torch.save({name: case.drawn(draw_tokens) for name, case in DRAWS.items()}, path)


def compile_kernels(capability: int) -> None:
    """Compile all kernels as a bfloat16 Llama uses them, and say how large the code is."""
    from cluster.engine.attention.triton.kernels import attend_kernel, combine_kernel
    from cluster.engine.draw.triton import draw_kernel

    common = {"HEAD_DIM": 128, "SHARING": 4, "SINKS": False, "BLOCK_M": 64, "BLOCK_D": 128}
    own = {"WINDOW": 64, "TREES": True, "CAPPED": True, "BLOCK_N": 64, "PRECISION": "tf32"}
    kernels = {
        attend_kernel: common | own,
        combine_kernel: common,
        draw_kernel: {"TRUNCATED": True, "BLOCK": 1024},
    }
    for kernel, constants in kernels.items():
        code = _compiled(kernel, constants, capability)
        sys.stdout.write(f"{kernel.__name__} {len(code.asm['cubin'])}\n")


def _compiled(kernel: Any, constants: dict[str, Any], capability: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {
        "query": "bf16",
        "kv": "bf16",
        "output": "bf16",
        "sinks": "bf16",
        "partials": "fp32",
        "partial_lse": "fp32",
        "layout": "i32",
        "logits": "fp32",
        "maxima": "fp32",
        "temperatures": "fp32",
        "cutoffs": "fp32",
        "best_scores": "fp32",
        "best_tokens": "i64",
        "seeds": "i64",
        "streams": "i64",
    }
    if kernel.__name__ == "draw_kernel":
        pointers["positions"] = "i64"
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = f"*{pointers[name]}"
        else:
            signature[name] = "fp32" if name in ("scaling", "softcap") else "i32"
    source = ASTSource(kernel, signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


if __name__ == "__main__":
    if sys.argv[1] == "attend":
        attend(sys.argv[2])
    elif sys.argv[1] == "draw":
        draw(sys.argv[2])
    else:
        compile_kernels(int(sys.argv[2]))
