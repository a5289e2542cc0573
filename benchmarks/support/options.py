"""Options that several benchmarks share, and how their values are read."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.support.answers import Law
from benchmarks.support.record import ROOT
from cluster.core import SamplingParams

# The embedded pair, which benchmarks serve by default.
DEMO_CONFIG = "configs/tiny.yaml"
DEMO_TARGET = ROOT / "models" / "demo-target"
DEMO_NAME = "drafthouse-demo"


def words(text: str) -> list[str]:
    """ "a,b" as ["a", "b"]."""
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def laws(text: str) -> list[Law]:
    return [Law.parse(word) for word in words(text)]


def sampling(text: str, max_tokens: int) -> SamplingParams:
    """Sampling by "greedy", or a temperature with top-p and top-k: "t0.7", "t0.7,p0.9,k50"."""
    values = {"t": 0.0, "p": 1.0, "k": 0.0}
    for word in text.split(",") if text != "greedy" else ():
        if word[:1] not in values:
            raise ValueError(f"law {text!r}: expected greedy, or e.g. t0.7 or t0.7,p0.9,k50")
        values[word[0]] = float(word[1:])
    return SamplingParams(
        temperature=values["t"], top_p=values["p"], top_k=int(values["k"]), max_tokens=max_tokens
    )


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose --help shows the module's docstring as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_options(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Options by name: the default, and with a text of help behind it where there is one.

    A default tells how the option is read: False = a switch, a list = words or numbers with commas
    between them; in place of one stands what reads a value, where None is the default.
    """
    for name, found in options.items():
        default, about = found if isinstance(found, tuple) else (found, None)
        how: dict[str, Any] = {"default": default, "type": type(default)}
        if default is False:
            how = {"action": "store_true"}
        elif callable(default):
            how = {"type": default}
        elif isinstance(default, list):
            how["type"] = numbers if isinstance(default[0], int) else words
        parser.add_argument(f"--{name.replace('_', '-')}", help=about, **how)


def add_config_options(parser: argparse.ArgumentParser, default: str = DEMO_CONFIG) -> None:
    """Ours: --config and --set, as `drafthouse serve` has them."""
    parser.add_argument("--config", default=default)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="K=V")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """The options of benchmarks over HTTP."""
    add_config_options(parser)
    add_options(parser, url=(str, "use this running server instead of starting one"))
