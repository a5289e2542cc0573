"""What the tests of the Triton kernels need a process of its own for.

    TRITON_INTERPRET=1 python -m tests.support.engine.triton_process attend OUT  every output
    TRITON_INTERPRET=1 python -m tests.support.engine.triton_process draw OUT    every token

Triton decides at its first import whether functions are compiled or interpreted.
"""

from __future__ import annotations

import sys

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


if __name__ == "__main__":
    {"attend": attend, "draw": draw}[sys.argv[1]](sys.argv[2])
