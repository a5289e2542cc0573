"""The draw in one Triton kernel is the draw: token for token that of the noise in rows.

Here it runs under Triton's interpreter; on a machine with a GPU also on that.
"""

import pytest
import torch

from cluster.worker.verifier import fused_draw
from tests.support.engine.interpreter import interpreted, needs_gpu
from tests.support.engine.triton_cases import DRAWS


@interpreted
@pytest.mark.parametrize("name", DRAWS)
def test_the_kernel_draws_what_the_reference_draws(name: str):
    from cluster.engine.draw.triton import draw_tokens

    assert DRAWS[name].drawn(draw_tokens).tolist() == DRAWS[name].drawn(None).tolist()


@needs_gpu
@pytest.mark.parametrize("name", DRAWS)
def test_the_kernel_on_the_gpu_draws_what_the_reference_draws(name: str):
    found = DRAWS[name].drawn(fused_draw(torch.device("cuda", 0), DRAWS[name].vocab_size), "cuda")
    assert found.tolist() == DRAWS[name].drawn(None).tolist()


def test_a_cpu_has_no_use_for_it():
    assert fused_draw(torch.device("cpu"), 100) is None
