"""What `drafthouse serve` has said when it is over."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.deployments.test_cli import config_file
from tests.support.deployments.command import Command

__all__ = ["config_file"]


def test_stdout_holds_the_ready_line_and_none_of_rays_own_words(
    config_file: Path, tmp_path: Path
) -> None:
    command = Command(tmp_path, str(config_file))
    try:
        command.wait_for("with drafts and without")
        assert command.stop(signal.SIGTERM) == 0
    finally:
        command.end()
    (line,) = command.stdout.read_text().splitlines()
    assert line.startswith("Drafthouse is ready: ")
    assert command.said_by_others() == []
