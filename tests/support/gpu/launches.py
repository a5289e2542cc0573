"""The launches of our Triton kernels as a GPU that is not here would be asked for them.

Triton's just-in-time compiler decides by the arguments of a launch what it compiles: which pointers
and sizes are divisible by 16, which are 1, which are constants.  So the engine's own code is run
until it launches, on a driver that names the GPU, and the compiler hands over what it was about to
compile.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from cluster.records import record

_WARP = 32


@record
class Launch:
    """kernel: the `triton.jit` function.  signature, constants, attributes, options: as the
    compiler takes them."""

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Any

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def compiled(self, capability: int) -> Any:
        """Triton's compiled kernel; raises whatever the compiler does."""
        source = ASTSource(
            self.kernel, dict(self.signature), dict(self.constants), dict(self.attributes)
        )
        target = GPUTarget("cuda", capability, _WARP)
        return triton.compile(source, target=target, options=vars(self.options))


class _Absent:
    """Triton's driver of a GPU that is not here.  Devices are named by their capability, since
    Triton keeps what it knows of a kernel by device."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, _WARP)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def launches(capability: int) -> Iterator[list[Launch]]:
    """The list to which every launch inside is added; nothing is compiled, and nothing runs."""
    found: list[Launch] = []

    def hook(*, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:
        kernel = fn.jit_function
        (attributes,) = compile["configs"]
        options = kernel.device_caches[capability][3].parse_options(_options(compile))
        found.append(
            Launch(kernel, compile["signature"], compile["constants"], attributes, options)
        )
        return True  # "it is in the cache": then Triton goes on without a kernel

    before, hooked = driver._active, knobs.runtime.jit_cache_hook
    driver.set_active(_Absent(capability))
    knobs.runtime.jit_cache_hook = hook
    try:
        yield found
    finally:
        driver._active = before
        knobs.runtime.jit_cache_hook = hooked


def _options(compile: Mapping[str, Any]) -> dict[str, Any]:
    names = ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion", "launch_cooperative_grid")
    return {name: compile[name] for name in names}
