"""A replica waits for the memory of the one whose place it takes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.config.schema import Config, EngineConfig, TargetConfig
from cluster.engine.cpu import threads
from cluster.engine.loading import planned
from cluster.worker import build, target_parts
from tests.support.clock import FakeClock

GB = 10**9
TOTAL = 80 * GB


class Card:
    """A GPU of 80 GB of which another process holds 68 until a time."""

    def __init__(self, until_s: float) -> None:
        self.clock = FakeClock(0.0)
        self.until_s = until_s

    def memory(self, device: torch.device) -> tuple[int, int]:
        assert device.type == "cuda"
        is_held = self.clock() < self.until_s
        return TOTAL - 68 * GB * is_held, TOTAL

    def await_room(self, config: EngineConfig) -> float:
        """How long it waited."""
        planned.await_room(config, self.memory, self.clock, self.sleep)
        return self.clock()

    def sleep(self, time_s: float) -> None:
        self.clock.now += time_s


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """Of 16 GB of weights."""
    monkeypatch.setattr(planned, "resolve_device", lambda name: torch.device(name))
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(16 * GB)  # a hole: it takes no space
    return EngineConfig(model=str(tmp_path), device="cuda:0")


def test_it_waits_until_the_other_has_ended(config: EngineConfig, caplog: pytest.LogCaptureFixture):
    assert 7.0 <= Card(7.0).await_room(config) < 8.0
    assert "waiting for memory of the GPU, 60 s at most" in caplog.text
    assert "missing_gb=12.0" in caplog.text


def test_it_waits_a_minute_and_then_lets_loading_say_what_is_missing(config: EngineConfig):
    assert 60.0 <= Card(1000.0).await_room(config) < 61.0


@pytest.mark.parametrize(
    "settings",
    [
        {"memory_fraction": 0.9999, "tensor_parallel": 2},  # 8 GB a rank fit beside the other
        {"num_pages": 100, "tensor_parallel": 2},
        {"device_map": "auto"},
        {"device": "cpu"},
    ],
)
def test_what_has_room_does_not_wait(config: EngineConfig, settings: dict[str, object]):
    assert Card(7.0).await_room(replace(config, **settings)) == 0.0


def test_a_target_waits_before_it_is_loaded(config: EngineConfig, monkeypatch: pytest.MonkeyPatch):
    class Waited(Exception):
        pass

    def wait(found: EngineConfig) -> None:
        assert found is config
        raise Waited

    monkeypatch.setattr(planned, "await_room", wait)
    monkeypatch.setattr(threads, "configure_threads", lambda _: None)
    monkeypatch.setattr(target_parts, "load_target_engine", None)
    with pytest.raises(Waited):
        build.load_rank(Config(target=TargetConfig(engine=config)), 0, "")
