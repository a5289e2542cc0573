"""The command line of `drafthouse`: its verbs and their options, as command_line.yaml has them."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import yaml

from cluster.errors import ConfigError
from cluster.options import DAY_S, api_key, listed, new_file, number, positive, seed, url, whole
from deployments import gpus, vllm_options
from deployments.asked import DEMONSTRATION

_Options = Mapping[str, Mapping[str, Any]]

_OF_FILES, _VERBS = yaml.safe_load_all(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
# Verbs whose module runs them; it is imported for them alone.
MODULES = {verb: told["module"] for verb, told in _VERBS.items() if "module" in told}
_TYPES: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "path": Path,
    "url": url,
    "key": api_key,
    "seed": seed,
    "new file": new_file,
    "number": number(),
    "seconds": positive(DAY_S),
    "whole": whole(),
    "whole or 0": whole(0),
    "8 or more": whole(8),
    "wholes": listed(whole()),
    "rates": listed(number(1.0 / DAY_S)),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the list of all options before it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def _version() -> str:
    try:
        return importlib.metadata.version("drafthouse")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed, run from its sources)"


def module_of(verb: str) -> ModuleType:
    return importlib.import_module(MODULES[verb])


def parser_for(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of a command line; `train`'s options are known to that of `train` alone."""
    parser = _Parser(prog="drafthouse", description="A serving cluster for speculative decoding.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, told in _VERBS.items():
        added = verbs.add_parser(verb, help=told["about"])
        if "file" in told:
            _add_options(added, {"file": {**_OF_FILES["file"], "nargs": told["file"]}})
            vllm_options.add_options(added)
            _add_options(added, {"--set": _OF_FILES["--set"]})
        _add_options(added, told.get("options", {}))
    # torch takes seconds to import: only for the verb that needs it.
    if argv[:1] == ["train"]:
        module_of("train").configure(verbs.choices["train"])
    return parser


def _add_options(parser: argparse.ArgumentParser, options: _Options) -> None:
    either = None
    for name, told in options.items():
        how, place = dict(told), parser.add_argument
        if how.pop("is_either", False):
            either = either or parser.add_mutually_exclusive_group()
            place = either.add_argument
        if kind := how.get("type"):
            # The module of one of its own is imported for that alone.
            how["type"] = _TYPES.get(kind) or partial(_read, kind)
        if "help" in how:
            named = {"gpus": ", ".join(gpus.known()), "demonstration": DEMONSTRATION}
            how["help"] = how["help"].format(**named)
        place(name, **how)


def _read(kind: str, text: str) -> Any:
    return pkgutil.resolve_name(kind)(text)
