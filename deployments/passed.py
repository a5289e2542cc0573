"""Models that have passed `preflight.inspect` and are as they were then, which need no other look.

A look takes torch and transformers, whose import takes three seconds: the larger part of what a
command does before Ray starts.  Nothing hangs on what is kept here but that time: whoever loads a
model checks it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.config.schema import Config
from cluster.models.cache import cache_folder, write_whole
from cluster.models.names import source_of
from cluster.models.resolve import find
from cluster.text.generation_config import load_sampling_defaults
from deployments.configured_models import engines
from deployments.preflight import check_settings, inspect

# Those that read a model's files.
_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub")
_HERE = Path(__file__).resolve().parent
_OWN_CODE = (_HERE, _HERE.with_name("cluster"))
# What decides whether a model can be computed here.
_PROGRAMS = ("nvidia-smi", "gcc", "clang")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CC")
_DRIVER = Path("/proc/driver/nvidia/version")
_NUM_KEPT = 100


def inspect_what_is_new(config: Config, say: Callable[[str], None], *, is_here: bool) -> None:
    """`preflight.inspect`, without a look at models that passed it before; says that it looks.

    Neither torch nor transformers is imported then, where no GPU is asked for."""
    found = {each.model: find(source_of(each.model)) for each in engines(config).values()}
    folders = {model: folder for model, folder in found.items() if folder is not None}
    path, digest = cache_folder() / "passed", _digest(config, folders.values(), is_here=is_here)
    known = _read(path)
    if digest not in known or len(folders) < len(found):
        say("checking the models, once until they, the settings or the program change")
        inspect(config, is_here=is_here)
        # A disk that cannot be written costs time, no more.
        with contextlib.suppress(OSError):
            write_whole(path, "\n".join([*known, digest][-_NUM_KEPT:]))
        return
    check_settings(config, is_here=is_here)
    settings = config.target
    load_sampling_defaults(folders[settings.engine.model], settings.generation_config)  # it warns


def _digest(config: Config, models: Iterable[Path], *, is_here: bool) -> str:
    """A digest of all that a verdict on the models of `config` hangs on."""
    wanted = [asdict(config.target), {name: asdict(each) for name, each in config.drafters.items()}]
    folders = {*models, *(Path(each) for each in _texts(wanted) if os.path.isdir(each))}
    hangs_on = [
        wanted,
        is_here,
        [(each, _files(each.glob("*"))) for each in sorted(map(Path.resolve, folders))],
        [_files(each.rglob("*.py")) for each in _OWN_CODE],
        [sys.version, *map(importlib.metadata.version, _LIBRARIES)],
        [os.environ.get(each) for each in _VARIABLES],
        [shutil.which(each) for each in _PROGRAMS],
        [sorted(map(str, Path("/dev").glob("nvidia*"))), _driver()],
    ]
    return hashlib.sha256(repr(hangs_on).encode()).hexdigest()


def _texts(value: Any) -> Iterator[str]:
    """All texts in a part of a configuration, some of which name folders."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


def _files(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Name, size and last change of each file; the system notes a change whatever a copy says."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            state = path.stat()
            found.append((str(path), state.st_size, state.st_ctime_ns))
    return sorted(found)


def _driver() -> str:
    try:
        return _DRIVER.read_text("utf-8", "replace")
    except OSError:
        return ""


def _read(path: Path) -> list[str]:
    with contextlib.suppress(OSError, ValueError):
        return path.read_text("ascii").split()
    return []
