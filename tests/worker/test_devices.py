"""What a worker says it computes on."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.worker.devices import devices_of


def on(device: str, tensor_parallel: int = 1) -> Any:
    config = SimpleNamespace(tensor_parallel=tensor_parallel)
    return SimpleNamespace(device=torch.device(device), config=config)


def test_cores_are_those_the_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    everything = devices_of()
    assert len(set(everything)) == len(allowed)
    assert devices_of(on("cpu")) == everything
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert devices_of() == everything[:1]
    finally:
        os.sched_setaffinity(0, allowed)


def test_gpus_are_told_apart_by_what_they_are_and_not_by_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = ["uuid-a", "uuid-b"]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(shown))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=shown[index])
    )
    first, second = devices_of(on("cuda")), devices_of(on("cuda:1"))
    assert len(first) == len(second) == 1
    assert set(first).isdisjoint(second)
    assert devices_of(on("cuda", tensor_parallel=2)) == first + second
    shown.reverse()  # another process, which is shown them in another order
    assert devices_of(on("cuda")) == second
    assert set(first).isdisjoint(devices_of())
