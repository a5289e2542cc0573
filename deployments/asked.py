"""The configuration that a command's arguments ask for, read and checked before anything starts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster import by_name
from cluster.config.file import ServeFile, in_file
from cluster.draft import registry
from cluster.errors import ConfigError
from deployments import vllm_options
from deployments.configured_models import check_models, engines, fetch_models
from deployments.passed import inspect_what_is_new

# What `drafthouse serve` serves where no file is named, and where its model cannot be had.
DEMONSTRATION = "configs/local.yaml"
EMBEDDED = "configs/tiny.yaml"


def asked(arguments: argparse.Namespace) -> ServeFile:
    """Return the configuration of a file, or of a model with drafters; see `load`."""
    drafts, settings = vllm_options.asked(arguments)
    return load(arguments.file or DEMONSTRATION, settings, drafts)


def with_models(
    file: ServeFile, arguments: argparse.Namespace, say: Callable[[str], None]
) -> ServeFile:
    """`file`, when its models are here and fit it; the embedded ones where nobody named any, and
    the demonstration's cannot be had."""
    try:
        with in_file(file.path):
            fetch_models(file.config, say)
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
        inspect_what_is_new(file.config, say, is_here=arguments.address is None)
    return file


def _models(file: ServeFile) -> list[str]:
    return [engine.model for engine in engines(file.config).values()]


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
        check_models(file.config)
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
