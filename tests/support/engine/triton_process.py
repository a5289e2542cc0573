"""What the Triton kernels compute, under the interpreter, in a process of its own.

    TRITON_INTERPRET=1 python -m tests.support.engine.triton_process OUT CASE...

Triton decides at its first import whether functions are compiled or interpreted.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from cluster.engine.attention.triton.backend import TritonBackend
from cluster.engine.draw.triton import draw_tokens
from tests.support.engine.triton_cases import CASES, DRAWS, SCRATCH_SLOT, Case


def attended(name: str, case: Case) -> dict[str, torch.Tensor]:
    """[rows, heads, head_dim] by the case's name, and where it has a form, attended in that."""
    batch, backend = case.batch, TritonBackend(case.num_programs)
    tensors = case.query(), case.kv(), case.window, case.options()
    found = {name: backend.plan(batch, SCRATCH_SLOT).attend(*tensors)}
    form = backend.form(batch.num_rows, max(share.num_rows for share in batch.shares))
    if form is not None:
        # What an earlier step left behind must do nothing.
        words = np.full(form.num_words(batch) + 64, 77_777, np.int32)
        form.lay_out(batch, words)
        found[f"{name}, in a form"] = form.plan(torch.from_numpy(words)).attend(*tensors)
    return found


if __name__ == "__main__":
    outputs = {f"draw {name}": case.drawn(draw_tokens) for name, case in DRAWS.items()}
    for name in sys.argv[2:]:
        outputs |= attended(name, CASES[name])
    torch.save(outputs, sys.argv[1])
