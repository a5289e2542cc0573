"""What needs Triton's interpreter passes, in one process of its own for all of it.

Triton decides at its first import whether functions are compiled or interpreted.
"""

from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.choices import by_day
from tests.support.engine.interpreter import IS_INTERPRETED, needs_triton, run_python

INTERPRETED = (
    "attention/test_triton.py::test_interpreted_kernels_equal_the_reference",
    "draw/test_triton.py::test_the_kernel_draws_what_the_reference_draws",
    "fused/test_forward.py",
    "fused/test_kernels.py",
    "graphs/test_graphs.py",
    "test_gpu_load.py",
    *by_day((), ("test_gpu_shapes.py",)),
)


@needs_triton
@pytest.mark.skipif(IS_INTERPRETED, reason="this is the process of its own")
def test_what_is_interpreted_passes():
    files = [str(Path(__file__).parent / name) for name in INTERPRETED]
    profile = f"--hypothesis-profile={settings.get_current_profile_name()}"
    assert " passed" in run_python("pytest", "-p", "no:cacheprovider", profile, *files)
