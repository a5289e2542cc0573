"""A folder of the cache is there whole or not at all, and is made once."""

import logging
import threading
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.models.cache import cache_folder, fill
from tests.conftest import python
from tests.support.clock import wait_until

KILLED = """
import os, sys
from pathlib import Path
from cluster.models.cache import fill

def make(scratch):
    (scratch / "model").mkdir()
    (scratch / "model" / "half").write_text("x")
    os._exit(7)

fill(Path(sys.argv[1]), make)
"""


def make(scratch: Path) -> Path:
    assert not list(scratch.iterdir())
    (scratch / "aside").write_text("is thrown away")
    folder = scratch / "model"
    folder.mkdir()
    (folder / "weights").write_text("whole")
    return folder


def never(scratch: Path) -> Path:
    raise AssertionError("it was there already")


def folders(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.is_dir()]


def test_what_was_made_is_kept_and_made_once(cache: Path):
    folder = fill(cache / "a", make)
    assert folder == fill(cache / "a", never)
    assert [path.name for path in folder.iterdir()] == ["weights"]
    assert folders(cache) == ["a"]


def test_a_failure_leaves_nothing(cache: Path):
    def fail(scratch: Path) -> Path:
        make(scratch)
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        fill(cache / "a", fail)
    assert folders(cache) == []
    assert fill(cache / "a", make).is_dir()


def test_a_killed_process_leaves_nothing_that_the_next_one_takes_for_a_model(cache: Path):
    assert python("-c", KILLED, cache / "a").returncode == 7
    assert not (cache / "a").exists()
    fill(cache / "a", make)
    assert folders(cache) == ["a"]


def test_two_at_the_same_time_make_it_once(cache: Path, caplog: pytest.LogCaptureFixture):
    making = threading.Event()

    def slowly(scratch: Path) -> Path:
        making.set()
        wait_until(lambda: "another process makes" in caplog.text)
        return make(scratch)

    caplog.set_level(logging.INFO, "cluster.models.cache")
    first = threading.Thread(target=fill, args=(cache / "a", slowly))
    first.start()
    assert making.wait(30)
    assert (fill(cache / "a", never) / "weights").read_text() == "whole"
    first.join()


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="DRAFTHOUSE_MODELS"):
        fill(tmp_path / "file" / "a", make)


def test_the_cache_is_below_the_users_own_unless_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("DRAFTHOUSE_MODELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "drafthouse" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "drafthouse" / "models"
