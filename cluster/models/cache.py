"""Folders that are made once per machine: whole or not at all, by one process at a time."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout

from cluster.errors import ConfigError, reason_of

log = logging.getLogger(__name__)

_NUM_DIGEST_CHARS = 12


def cache_folder() -> Path:
    """Where models are kept: $DRAFTHOUSE_MODELS, else drafthouse/models in the user's cache."""
    own = os.environ.get("DRAFTHOUSE_MODELS")
    if own:
        return Path(own).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "drafthouse" / "models"


def place(stem: str, sha256: str, version: int) -> Path:
    """The cache's folder for what is made of these bytes by this version of the code."""
    return cache_folder() / f"{stem}-{sha256[:_NUM_DIGEST_CHARS]}-v{version}"


def fill(folder: Path, make: Callable[[Path], Path]) -> Path:
    """`folder`, made by `make` where it is not there yet.

    make: takes an empty scratch folder, returns the folder in it that is to be kept.  When it
    fails, or the process ends, nothing is left that looks like `folder`.  Raises ConfigError where
    the cache cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not folder.is_dir():
                _make(folder, make)
    except OSError as error:
        raise ConfigError(
            f"the model cannot be kept in {folder.parent}: {reason_of(error)}; make room there, or "
            "name another folder with the environment variable DRAFTHOUSE_MODELS"
        ) from error
    return folder


def write_whole(path: Path, text: str) -> None:
    """Replace a small file at once, so that nobody reads half of it; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, "utf-8")
    unfinished.replace(path)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make(folder: Path, make: Callable[[Path], Path]) -> None:
    # A fixed name: what a killed process has left is found and removed by the next.
    scratch = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        make(scratch).rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _locked(folder: Path) -> AbstractContextManager[object]:
    """The lock of `folder`, for a `with`; it ends with the process at the latest."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        log.info("another process makes %s, waiting for it", folder)
        return lock.acquire()
