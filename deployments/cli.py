"""`drafthouse VERB ...`: results on stdout, progress on stderr, the truth in the exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import logging
import os
import pkgutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import yaml

from cluster import logs
from cluster.config.file import ServeFile, in_file
from cluster.errors import ConfigError, DrafthouseError
from cluster.logs import say
from cluster.options import add_options
from cluster.worker.priority import importing
from deployments import vllm_options
from deployments.access import new_key
from deployments.applied import apply, difference
from deployments.asked import (
    DEMONSTRATION,
    asked,
    check_api_key,
    load,
    places_of_drafters,
    with_api_keys,
    with_models,
)
from deployments.configured_models import fetch_model, models_table
from deployments.evaluate import command as evaluate_command
from deployments.memory_plan import known_gpus
from deployments.plan import check_text, plan_text
from deployments.preflight import inspect
from deployments.supervisor import EXIT_BAD_CONFIG, EXIT_INTERRUPTED, supervised

# The verbs and their options.
_VERBS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
# Verbs that a function runs, whose module is imported for them alone.
_RUN = {verb: told["run"] for verb, told in _VERBS.items() if "run" in told}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the list of all options before it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def _version() -> str:
    try:
        return importlib.metadata.version("drafthouse")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed, run from its sources)"


def parser_for(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of a command line; `train`'s options are known to that of `train` alone."""
    parser = _Parser(prog="drafthouse", description="A serving cluster for speculative decoding.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    named = {"gpus": ", ".join(known_gpus()), "demonstration": DEMONSTRATION}
    for verb, told in _VERBS.items():
        added = verbs.add_parser(verb, help=told["about"])
        if told.get("is_configured"):
            vllm_options.add_options(added)
        add_options(added, told.get("options", {}), **named)
    # torch takes seconds to import: only for the verb that needs it.
    if argv[:1] == ["train"]:
        from cluster.train.cli import configure

        configure(verbs.choices["train"])
    return parser


# What the extra `serve` installs: the library does without.
_SERVED_WITH = ("ray", "fastapi", "uvicorn", "httpx", "argcomplete", "rich")

EXIT_OK = 0
EXIT_FAILED = 1
# As a shell says of a process that SIGPIPE has ended.
EXIT_UNREAD = 141
# Of a text that cannot be read, so much is shown on both sides.
_NEAR = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code."""
    given = sys.argv[1:] if argv is None else argv
    return _guarded(lambda: _command(given))


def _command(given: Sequence[str]) -> int:
    for word in given:
        word.encode()  # raises UnicodeError, before anything is done
    parser = parser_for(given)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow; this ends the process
        from argcomplete import autocomplete

        autocomplete(parser)
    arguments = parser.parse_args(given)
    form: logs.LogFormat = getattr(arguments, "log_format", None) or "text"
    logs.configure(form, "%(levelname)s %(name)s: %(message)s")
    return _run(arguments)


def _guarded(command: Callable[[], int]) -> int:
    """The exit status of `command`; what it raises is said on stderr."""
    try:
        status = command()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever reads has what it wants, as `head` does
        return EXIT_UNREAD
    except OSError as error:
        place = error.filename or "reading or writing"
        say(f"{place}: {error.strerror or error}", logging.ERROR)
        return EXIT_FAILED
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        near = error.object[max(error.start - _NEAR, 0) : error.end + _NEAR]
        say(f"what was given is not valid UTF-8, at {near!r}", logging.ERROR)
        return EXIT_BAD_CONFIG
    except ModuleNotFoundError as error:
        if error.name not in _SERVED_WITH:
            raise
        say(f"{error.name} is not installed; pip install 'drafthouse[serve]'", logging.ERROR)
        return EXIT_FAILED
    except DrafthouseError as error:
        # Other libraries' reasons have paragraphs.
        say(" ".join(error.message.split()), logging.ERROR)
        return EXIT_BAD_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED


def run() -> NoReturn:
    """The console script: `main`, then the end of the process.

    Without the interpreter's own teardown: Ray's threads may outlive it and abort the process.
    """
    _prepare_streams()
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # it is said already
            stream.flush()
    os._exit(code)


def _prepare_streams() -> None:
    """Open what the caller has closed, as C programs do, or the next file would take its place;
    such an output fails when it is written to.  No character is a reason to fail."""
    for name, mode, flag, errors in (
        ("stdin", "r", os.O_RDONLY, "surrogateescape"),
        ("stdout", "w", os.O_RDONLY, "backslashreplace"),
        ("stderr", "w", os.O_WRONLY, "backslashreplace"),
    ):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flag), mode))
        else:
            stream.reconfigure(errors=errors)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.verb in _RUN:
        return int(pkgutil.resolve_name(_RUN[arguments.verb])(arguments))
    if arguments.verb == "serve":
        return _serve(asked(arguments), arguments)
    for text in _told(arguments):
        print(text, end="", flush=True)
    return EXIT_OK


def _told(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield what a command prints."""
    match arguments.verb:
        case "models":
            yield models_table()
        case "key":
            yield new_key(arguments.name)
        case "completion":
            from argcomplete.shell_integration import shellcode

            yield shellcode(["drafthouse"], shell=arguments.shell) + "\n"
        case "fetch":
            with _terminable():
                folder = fetch_model(arguments.name)
            yield f"{folder}\n"
        case "diff":
            old, new = (load(path, ()).document for path in (arguments.old, arguments.new))
            yield difference(old, new)
        case "simulate":
            yield from _simulated(Path(arguments.file))
        case "apply":
            yield apply(asked(arguments))
        case "evaluate":
            file = asked(arguments)
            with in_file(file.path):
                inspect(file.config, is_here=True)
            yield evaluate_command.evaluate(file.config, arguments)
        case verb:
            file = asked(arguments)
            with in_file(file.path):
                text_of = check_text if verb == "check" else plan_text
                text = text_of(file.config, arguments)
            yield text


def _simulated(path: Path) -> Iterator[str]:
    from cluster.simulate import fleet, settings

    scene, found = settings.read(path), list[fleet.Row]()
    yield f"{fleet.head(scene)}\n"
    for row in fleet.rows(scene):
        yield f"{row}\n"
        found.append(row)
    yield f"{fleet.verdict(found)}\n"


def _serve(file: ServeFile, arguments: argparse.Namespace) -> int:
    if file.config.log_format == "json":
        logs.configure("json", anew=True)
    check_api_key(file, arguments)
    from deployments.placement import check_free
    from deployments.ray_environment import prepare_to_join, prepare_to_start

    if arguments.address is not None:
        prepare_to_join()
        return _served(file, arguments)
    check_free(file.config)
    prepare_to_start(file.config, places_of_drafters(file))
    return supervised(lambda folder: _guarded(lambda: _served(file, arguments, folder)))


def _served(file: ServeFile, arguments: argparse.Namespace, folder: Path | None = None) -> int:
    """folder: of a Ray of this command's own; None where it joins another."""
    with _terminable():
        if folder is not None:
            file = with_api_keys(file, arguments, folder)
        file = with_models(file, arguments)
    if folder is not None:
        # Of all processes that are started from now on some leave what they have there behind.
        os.environ["TMPDIR"] = str(folder)
    with importing():
        from deployments.serve_command import serve_until_stopped

    return serve_until_stopped(file, folder or arguments.address)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Inside, SIGTERM ends like Ctrl-C, so that what is half fetched is removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    run()
