"""The command line of `drafthouse`: its verbs and their options, as command_line.yaml has them."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import yaml

from cluster.errors import ConfigError
from cluster.options import add_options
from deployments import gpus, vllm_options
from deployments.asked import DEMONSTRATION

_OF_FILES, _VERBS = yaml.safe_load_all(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
# Verbs whose module runs them; it is imported for them alone.
MODULES = {verb: told["module"] for verb, told in _VERBS.items() if "module" in told}


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
    add = partial(add_options, gpus=", ".join(gpus.known()), demonstration=DEMONSTRATION)
    for verb, told in _VERBS.items():
        added = verbs.add_parser(verb, help=told["about"])
        if "file" in told:
            add(added, {"file": {**_OF_FILES["file"], "nargs": told["file"]}})
            vllm_options.add_options(added)
            add(added, {"--set": _OF_FILES["--set"]})
        add(added, told.get("options", {}))
    # torch takes seconds to import: only for the verb that needs it.
    if argv[:1] == ["train"]:
        module_of("train").configure(verbs.choices["train"])
    return parser
