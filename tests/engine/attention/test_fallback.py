"""Where Triton's kernels cannot be launched, the reference attends and draws; nothing is refused.

Without a GPU, and not interpreted, no launch succeeds: that is the host of these tests.
"""

from pathlib import Path

import pytest
import torch

from cluster.engine.attention.sdpa import SdpaBackend
from cluster.engine.launch import KernelHealth
from cluster.engine.state import engine_state
from cluster.engine.work import Work
from tests.support.engine.driver import load_engine, prompt, rows, run
from tests.support.engine.interpreter import has_triton
from tests.support.engine.triton_cases import PROMPT, RAGGED, Case

pytestmark = pytest.mark.skipif(
    not has_triton or torch.cuda.is_available(), reason="needs Triton, and no GPU"
)


@pytest.fixture
def _believes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend takes tensors on the CPU for ones that its kernels can be launched on."""
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", True)


@pytest.mark.usefixtures("_believes")
def test_a_failed_launch_is_warned_of_once_and_the_reference_attends(
    caplog: pytest.LogCaptureFixture,
):
    from cluster.engine.attention.triton.backend import TritonBackend

    backend = TritonBackend()
    for case in (Case(RAGGED), Case(PROMPT, sinks=True), Case(RAGGED, window=70)):
        assert torch.equal(case.attended(backend), case.attended(SdpaBackend()))
    backend.warm_up()

    assert len(caplog.records) == 1
    assert "attention: the Triton kernels cannot run here" in caplog.text
    # No graph is captured of kernels that do not run.
    assert backend.form(8, 8) is None


@pytest.mark.usefixtures("_believes")
def test_an_engine_whose_kernels_cannot_be_launched_serves_by_the_reference(
    llama_folder: Path, caplog: pytest.LogCaptureFixture
):
    work = Work("a", 0, prompt(20))
    engine = load_engine(llama_folder, attention="triton")
    found = rows(run(engine, work))

    # Which has its linear layers packed for a CPU.
    expected = rows(run(load_engine(llama_folder, attention="sdpa"), work))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    warned = [record.name for record in caplog.records]
    assert warned == ["cluster.engine.fused.forward", "cluster.engine.launch"]
    state = engine_state(engine)
    assert state.attention == "sdpa"
    attention, layers = state.fallbacks
    assert attention.startswith("attention: the Triton kernels cannot run here: ")
    assert layers.startswith("layers: transformers' own forward is used: ")


def test_kernels_that_other_ranks_count_on_are_not_given_up_alone():
    health = KernelHealth("attention")
    health.settle()
    with pytest.raises(RuntimeError, match="attention: the Triton kernels fail: OSError: gone"):
        health.fail(OSError("gone"))
    assert not health.failure


def test_a_draw_that_cannot_be_launched_is_left_to_the_reference(
    caplog: pytest.LogCaptureFixture,
):
    from cluster.engine.draw.triton import create_draw

    assert create_draw(torch.device("cpu"), 100) is None
    assert len(caplog.records) == 1
    assert "draws: the Triton kernels cannot run here" in caplog.text
