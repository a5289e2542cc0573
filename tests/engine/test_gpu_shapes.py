"""The kernels over a step's true shapes equal their references, in Triton's interpreter.

It takes a minute: `make check-gpu-offline` and a night ask for it.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from cluster.core import EMPTY_TREE
from cluster.engine.attention.sdpa import SdpaBackend
from tests.support.engine.interpreter import interpreted
from tests.support.engine.triton_cases import Case, DrawCase, lay_out, tree_of_size
from tests.support.gpu.models import CONFIGS, Attending

_PROGRAMS = 264  # two for each multiprocessor of an H100

# A long context whose keys are split, nodes behind a shorter one, a text that has just begun.
STEP = lay_out((1100, 1, EMPTY_TREE, 0), (530, 1, tree_of_size(8), 0), (30, 1, EMPTY_TREE, 0))
CHUNK = lay_out((30, 1, EMPTY_TREE, 0), (300, 20, EMPTY_TREE, 0))
KINDS = dict.fromkeys(each for name in CONFIGS for each in Attending.of(name))


@interpreted
@pytest.mark.parametrize("chunk", [False, True], ids=["a step", "a chunk"])
@pytest.mark.parametrize("own", KINDS, ids=str)
def test_attention_of_each_model_equals_the_reference(own: Attending, *, chunk: bool):
    from cluster.engine.attention.triton.backend import TritonBackend

    # Key heads are the grid: two tell what eight do.
    case = Case(
        CHUNK if chunk else STEP,
        heads=2 * own.heads // own.kv_heads,
        head_dim=own.head_dim,
        window=own.window,
        sinks=own.sinks,
    )
    found, expected = case.attended(TritonBackend(_PROGRAMS)), case.attended(SdpaBackend())
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@interpreted
@pytest.mark.parametrize("top_k", [0, 50])
def test_draws_from_a_true_vocabulary_equal_the_reference(top_k: int):
    from cluster.engine.draw.triton import draw_tokens

    case = DrawCase(128_256, temperatures=(0.6, 1.0), top_k=top_k)
    assert case.drawn(draw_tokens).tolist() == case.drawn(None).tolist()
