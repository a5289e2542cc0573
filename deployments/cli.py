"""`drafthouse VERB ...`: results on stdout, progress on stderr, the truth in the exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType
from typing import NoReturn

from cluster import config_file
from cluster.config_file import ServeFile
from cluster.draft import registry
from cluster.errors import ConfigError, DrafthouseError
from deployments.models import check_models, fetch_model, fetch_models, models_table

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ConfigError as error:
        print(f"drafthouse: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except DrafthouseError as error:
        print(f"drafthouse: {error}", file=sys.stderr)
        return EXIT_FAILED


def run() -> NoReturn:
    """The console script: `main`, then the end of the process.

    Without the interpreter's own teardown: Ray's threads may outlive it and abort the process.
    """
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.verb == "train":
        return int(_training().run(arguments))
    if arguments.verb == "models":
        print(models_table(), end="")
        return EXIT_OK
    if arguments.verb == "fetch":
        with _terminable():
            print(fetch_model(arguments.name, _say))
        return EXIT_OK
    file = load(arguments.file, arguments.overrides)
    # Ray takes seconds to import: only for those who need it.
    if arguments.verb == "check":
        from deployments.plan import plan

        print(plan(file.config), end="")
        return EXIT_OK
    from deployments.ports import check_free
    from deployments.ray_environment import prepare_to_join, prepare_to_start

    if arguments.address is None:
        check_free(file.config)
        prepare_to_start(file.config)
    else:
        prepare_to_join()
    with _terminable():
        fetch_models(file.config, _say)
    from deployments.serve_command import serve_until_stopped

    return serve_until_stopped(file, arguments.address)


def load(path: str, overrides: Sequence[str]) -> ServeFile:
    """Read a configuration and check what can be checked before anything is started.

    Raises ConfigError with `file: path of the key: what is wrong and the remedy`.
    """
    file = config_file.load(path, overrides)
    try:
        for name, drafter in file.config.drafters.items():
            registry.check(name, drafter)
        check_models(file.config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", param=error.param) from error
    return file


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Inside, SIGTERM ends like Ctrl-C, so that what is half fetched is removed."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str) -> None:
    print(f"drafthouse: {text}", file=sys.stderr, flush=True)


def _version() -> str:
    try:
        return importlib.metadata.version("drafthouse")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed, run from its sources)"


def _training() -> ModuleType:
    return importlib.import_module("cluster.train.cli")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="drafthouse", description="A serving cluster for speculative decoding."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    serve = verbs.add_parser("serve", help="start the cluster and serve until Ctrl-C")
    _add_file(serve)
    serve.add_argument(
        "--address", help="join a running Ray cluster (`auto` or HOST:PORT) instead of starting one"
    )
    _add_file(verbs.add_parser("check", help="check a configuration and print the plan"))
    verbs.add_parser("models", help="list the models that are known by name")
    fetch_one = verbs.add_parser("fetch", help="get a model; prints the folder it lies in")
    fetch_one.add_argument(
        "name", help="one of `drafthouse models`, owner/name[@revision] on the hub, or a GGUF file"
    )
    train = verbs.add_parser("train", help="train the demonstration models")
    # torch takes seconds to import: only for the verb that needs it.
    if argv and argv[0] == "train":
        _training().configure(train)
    return parser.parse_args(argv)


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a Ray Serve config file, e.g. local.yaml")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting, e.g. target.engine.dtype=float32 or http.port=8123",
    )


if __name__ == "__main__":
    run()
