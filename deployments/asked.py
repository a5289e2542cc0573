"""The configuration that a command's arguments ask for, read and checked before anything starts."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster import by_name
from cluster.config.file import ServeFile, in_file
from cluster.config.schema import Config
from cluster.draft import registry
from cluster.errors import ConfigError
from cluster.logs import say
from cluster.models.cache import cache_folder, write_whole
from cluster.models.resolve import find
from cluster.text.generation_config import load_sampling_defaults
from deployments import vllm_options
from deployments.configured_models import engines, fetch_models
from deployments.preflight import check_settings, inspect

# Models that have passed `preflight.inspect` and are as they were then, which need no other look.
#
# A look takes torch and transformers, whose import takes three seconds: the larger part of what a
# command does before Ray starts. Nothing hangs on what is kept here but that time: whoever loads
# a model checks it again.


# Those that read a model's files.
_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub")
_HERE = Path(__file__).resolve().parent
_OWN_CODE = (_HERE, _HERE.with_name("cluster"))
_NUM_KEPT = 100


def inspect_what_is_new(config: Config, *, is_here: bool) -> None:
    """`preflight.inspect`, without a look at models that passed it before; says that it looks.

    Neither torch nor transformers is imported then, where no GPU is asked for."""
    target, *others = (find(each.source) for each in engines(config))
    folders = {*filter(None, (target, *others))}
    path, digest = cache_folder() / "passed", _digest(config, folders, is_here=is_here)
    known = path.read_text("ascii", "replace").split() if path.is_file() else []
    if target is None or None in others or digest not in known:
        say("checking the models, once until they, the settings or the program change")
        inspect(config, is_here=is_here)
        # A disk that cannot be written costs time, no more.
        with contextlib.suppress(OSError):
            write_whole(path, "\n".join([*known, digest][-_NUM_KEPT:]))
        return
    check_settings(config, is_here=is_here)
    load_sampling_defaults(target, config.target.generation_config)  # it warns


def _digest(config: Config, models: Iterable[Path], *, is_here: bool) -> str:
    """A digest of all that a verdict on the models of `config` hangs on."""
    settings = asdict(config)
    wanted = settings["target"], settings["drafters"]
    folders = {*models, *(Path(each) for each in _texts(wanted) if os.path.isdir(each))}
    hangs_on = [
        wanted,
        is_here,
        [(each, _files(each.glob("*"))) for each in sorted(map(Path.resolve, folders))],
        [_files(each.rglob("*.py")) for each in _OWN_CODE],
        [sys.version, *map(importlib.metadata.version, _LIBRARIES)],
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


# What `drafthouse serve` serves where no file is named, and where its model cannot be had.
DEMONSTRATION = "configs/local.yaml"
EMBEDDED = "configs/tiny.yaml"


def asked(arguments: argparse.Namespace) -> ServeFile:
    """Return the configuration of a file, or of a model with drafters; see `load`."""
    drafts, settings = vllm_options.asked(arguments)
    return load(arguments.file or DEMONSTRATION, settings, drafts)


def with_models(file: ServeFile, arguments: argparse.Namespace) -> ServeFile:
    """`file`, when its models are here and fit it; the embedded ones where nobody named any, and
    the demonstration's cannot be had."""
    try:
        with in_file(file.path):
            fetch_models(file.config)
    except ConfigError:
        if arguments.file is not None or _models(file) != _models(load(DEMONSTRATION, ())):
            raise  # whoever names a model wants that one
        model = file.config.target.engine.model
        say(
            f"{model} cannot be had here, so {EMBEDDED} is served instead; "
            f"`drafthouse fetch {model}` says why"
        )
        file = load(EMBEDDED, vllm_options.asked(arguments)[1])
    with in_file(file.path):
        inspect_what_is_new(file.config, is_here=arguments.address is None)
    return file


def _models(file: ServeFile) -> list[str]:
    return [each.settings.model for each in engines(file.config)]


def load(name: str, overrides: Sequence[str], drafts: Sequence[str] = ()) -> ServeFile:
    """Read a configuration and check what can be checked before anything is started.

    name, drafts: a file, or a model and what drafts for it; see `cluster.by_name`.  Raises
    ConfigError with `file: path of the key: what is wrong and the remedy`.
    """
    file = by_name.read(name, drafts, overrides)
    registry.search_in(*places_of_drafters(file))
    with in_file(file.path):
        for each, drafter in file.config.drafters.items():
            registry.check(each, drafter)
        engines(file.config)  # whose models have names that can be
    return file


def places_of_drafters(file: ServeFile) -> tuple[Path, ...]:
    """Where the modules of external drafters may lie, beside where all modules are."""
    if not any(":" in drafter.kind for drafter in file.config.drafters.values()):
        return ()
    return Path.cwd(), file.path.resolve().parent


def with_api_keys(file: ServeFile, arguments: argparse.Namespace, folder: Path) -> ServeFile:
    """Return `file` for clients that have one of the keys of --api-key, if there is any.

    folder: for the file of keys, as long as it is served."""
    if not arguments.api_key:
        return file
    path = folder / "keys.json"
    path.write_text(vllm_options.keys_file(arguments.api_key), "utf-8")
    arguments.overrides = [*arguments.overrides, f"access.keys_file={path}"]
    return asked(arguments)


def check_api_key(file: ServeFile, arguments: argparse.Namespace) -> None:
    """Raise ConfigError where another file names the keys, or parts elsewhere could not read it."""
    is_elsewhere = arguments.address is not None
    if arguments.api_key and (is_elsewhere or file.config.access.keys_file):
        raise ConfigError(
            "--api-key: with --address, or where access.keys_file names a file, the keys are those "
            "of that file; `drafthouse key NAME` makes an entry for it"
        )
