"""Waits for the memory of a GPU that a process before this one still holds.

A replica that takes another's place is raised beside it while it ends; what it had is free a moment
later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from cluster.config.schema import EngineConfig
from cluster.engine.device import resolve_device
from cluster.engine.memory.pool_sizes import gpu_share
from cluster.models.resolve import resolve
from cluster.models.weights import stored_bytes

log = logging.getLogger(__name__)

# A process that is ended with gigabytes of pinned memory takes some seconds.
_PATIENCE_S = 60.0
_STEP_S = 0.5


def await_room(
    config: EngineConfig,
    memory: Callable[[torch.device], tuple[int, int]] = torch.cuda.mem_get_info,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once the model's weights have room on its GPU, or after 60 s: then loading says what
    is missing.

    memory: a device's free and total bytes."""
    device = resolve_device(config.device)
    # What several devices or fewer bits take, transformers knows alone.
    if device.type != "cuda" or config.device_map is not None or config.quantization is not None:
        return
    if config.tensor_parallel > 1:
        device = torch.device("cuda")  # the rank's own, which is the current one
    wanted = stored_bytes(resolve(config.model)) // config.tensor_parallel
    # As the KV cache is measured, which is to be more than nothing.
    left_to_others = 0.0 if config.num_pages else 1.0 - gpu_share(config)
    deadline = clock() + _PATIENCE_S

    def missing() -> float:
        free, total = memory(device)
        return wanted + left_to_others * total - free

    if (short := missing()) > 0:
        log.warning(
            "waiting for memory of the GPU, %.0f s at most device=%s missing_gb=%.1f: another "
            "process has it, which may be ending",
            _PATIENCE_S,
            device,
            short / 1e9,
        )
    while missing() > 0 and clock() < deadline:
        sleep(_STEP_S)
