"""How much of a model's weights has been read, as far as the system says it."""

from __future__ import annotations

import logging
import mmap
import threading
from pathlib import Path

import pytest

from cluster.engine.loading import progress


def test_what_is_mapped_and_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "phase load: 4 of 4 MB of weights read":
                said.set()

    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    monkeypatch.setattr(progress.log, "handlers", [Listener()])
    caplog.set_level(logging.INFO)
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(4 * 10**6))
    with (
        progress.telling_of_weights(tmp_path),
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert len(mapped[:]) == 4 * 10**6
        assert said.wait(60.0)
    assert caplog.messages[0] == "phase load"
