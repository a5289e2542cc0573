"""The Triton kernels compute what the SDPA reference computes.

Here they run under Triton's interpreter; on a machine with a GPU also on that.
"""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cluster.core import EMPTY_TREE
from cluster.engine.attention.backends import create_backend
from cluster.engine.attention.sdpa import SdpaBackend
from cluster.engine.cpu import kernels
from tests.support.engine.interpreter import (
    has_triton,
    interpreted,
    needs_gpu,
    needs_triton,
)
from tests.support.engine.triton_cases import CASES, DECODING, INTERPRETED, SCRATCH_SLOT, Case
from tests.support.engine.triton_cases import lay_out as lay_out_batch
from tests.support.errors import config_error

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def _expected(case: Case) -> torch.Tensor:
    plan = SdpaBackend().plan(case.batch, SCRATCH_SLOT)
    return plan.attend(case.query().float(), case.kv().float(), case.window, case.options())


def _check(case: Case, found: torch.Tensor) -> None:
    expected, tolerance = _expected(case), TOLERANCES[case.dtype]
    assert found.dtype == case.dtype
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@interpreted
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_kernels_equal_the_reference(name: str):
    """And give the same bits in a layout that has room for any batch of its width."""
    from cluster.engine.attention.triton.backend import TritonBackend

    case = CASES[name]
    batch, backend = case.batch, TritonBackend(case.num_programs)
    tensors = case.query(), case.kv(), case.window, case.options()
    found = backend.plan(batch, SCRATCH_SLOT).attend(*tensors)
    _check(case, found)
    form = backend.form(batch.num_rows, max(share.num_rows for share in batch.shares))
    if form is None:
        # The interpreter leaves these to the reference, which has no forms.
        assert case.head_dim > 256 or case.dtype == torch.bfloat16
        return
    # What an earlier step left behind must do nothing.
    words = np.full(form.num_words(batch) + 64, 77_777, np.int32)
    form.lay_out(batch, words)
    assert torch.equal(form.plan(torch.from_numpy(words)).attend(*tensors), found)


@needs_triton
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 40)), max_size=8),
    st.integers(0, 20),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([(1, 1), (2, 1), (2, 7), (8, 100), (1, 4096), (3, 64)]),
)
def test_a_frame_holds_every_batch_of_its_width(
    shares: list[tuple[int, int]], padding: int, rows_per_tile: int, programs: tuple[int, int]
):
    from cluster.engine.attention.triton.layout import Frame, Tiling, lay_out, num_words

    num_rows = sum(new for _, new in shares) + padding
    assume(num_rows)
    specs = [(cached, new, EMPTY_TREE, 0) for cached, new in shares]
    batch = lay_out_batch(*specs, min_rows=num_rows)
    tiling = Tiling(rows_per_tile, 16, *programs)
    tight, roomy = lay_out(batch, tiling).frame, Frame.holding(num_rows, tiling)
    fields = ("num_items", "num_tiles", "num_rows", "num_split_rows", "num_partials")
    for name in fields:
        assert getattr(tight, name) <= getattr(roomy, name), name
    words = lay_out(batch, tiling, roomy, np.full(num_words(batch, roomy), 77, np.int32)).words
    own, all_items = tight.num_items * 4, roomy.num_items * 4
    assert words[:own].tolist() == lay_out(batch, tiling).words[:own].tolist()
    idle = words[own:all_items].reshape(-1, 4)
    assert (idle == (roomy.num_tiles, 0, 0, -1)).all()
    nobody = roomy.tiles + roomy.num_tiles * 9
    assert not words[nobody : nobody + 9].any()


@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_kernels_on_the_gpu_equal_the_reference(name: str):
    from cluster.engine.attention.triton.backend import TritonBackend

    case = CASES[name]
    options = case.options()
    if options.sinks is not None:
        options = type(options)(options.scaling, options.softcap, options.sinks.cuda())
    plan = TritonBackend(case.num_programs).plan(case.batch, SCRATCH_SLOT)
    found = plan.attend(case.query().cuda(), case.kv().cuda(), case.window, options)
    _check(case, found.cpu())


def test_auto_is_the_best_one_for_the_device(monkeypatch: pytest.MonkeyPatch):
    if torch.cuda.is_available():
        on_gpu = type(create_backend("auto", torch.device("cuda", 0))).__name__
        assert on_gpu == ("TritonBackend" if has_triton else "SdpaBackend")
    on_cpu = type(create_backend("auto", CPU)).__name__
    assert on_cpu == ("SdpaBackend" if kernels.load() is None else "NativeBackend")
    monkeypatch.setattr(kernels, "load", lambda: None)
    assert isinstance(create_backend("auto", CPU), SdpaBackend)


def test_the_triton_backend_leaves_layers_on_a_cpu_to_the_reference(
    monkeypatch: pytest.MonkeyPatch,
):
    if not has_triton:
        pytest.skip("triton is not installed")
    from cluster.engine.attention.triton.backend import TritonBackend

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    case = Case(DECODING)
    assert torch.equal(case.attended(TritonBackend()), _expected(case))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_triton_backend_is_refused_without_a_gpu():
    with config_error("needs an NVIDIA GPU" if has_triton else "the triton"):
        create_backend("triton", CPU)
