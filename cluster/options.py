"""Options of commands, as files describe them, and what their values may be: said in one line,
before any work.
"""

from __future__ import annotations

import math
import pkgutil
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cluster.config.doors import url_of

# What no clock of ours waits longer for.
DAY_S = 86_400.0
# Seeds are 64 bits with a sign in OpenAI's API.
_MAX_SEED = 2**63 - 1
# What is counted out is held in memory.
_MANY = 10**7
T = TypeVar("T")
N = TypeVar("N", int, float)


def _reader(kind: type[N], fits: Callable[[N], bool], what: str) -> Callable[[str], N]:
    def read(text: str) -> N:
        # Python would take `1_000`, and digits of other scripts.
        try:
            value = kind(text if text.isascii() and "_" not in text else "")
            if math.isfinite(value) and fits(value):
                return value
        except (ValueError, OverflowError):
            pass
        raise ArgumentTypeError(f"{text!r} is no {what}")

    return read


def _is_visible(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def _bound(most: float) -> str:
    return "" if math.isinf(most) else f" and at most {most:,.0f}"


def whole(least: int = 1, most: int = _MANY) -> Callable[[str], int]:
    """Return what reads a whole number from `least` to `most`."""
    what = f"whole number of at least {least}{_bound(most)}"
    return _reader(int, lambda value: least <= value <= most, what)


def number(least: float = 0.0) -> Callable[[str], float]:
    """Return what reads a finite number of at least `least`."""
    return _reader(float, lambda value: least <= value, f"number of at least {least:g}")


def positive(most: float = math.inf) -> Callable[[str], float]:
    """Return what reads a finite number above 0."""
    return _reader(float, lambda value: 0.0 < value <= most, f"number above 0{_bound(most)}")


seed = whole(0, _MAX_SEED)
port = whole(0, 65_535)
share = _reader(float, lambda value: 0.0 <= value < 1.0, "share, from 0 to below 1")


def listed(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return what reads several, with commas between them."""
    return lambda text: [read(word) for word in text.split(",")]


def url(text: str) -> str:
    """Read the address of a server."""
    try:
        is_one = url_of(text) and _is_visible(text) and not set("?#") & set(text)
    except ValueError:
        is_one = False
    if not is_one:
        raise ArgumentTypeError(f"{text!r} is no address; write http://HOST:PORT")
    return text


def api_key(text: str) -> str:
    """Read a key that an HTTP header can carry; "" = none."""
    if not _is_visible(text):
        raise ArgumentTypeError("a key has visible ASCII characters only")
    return text


def new_file(text: str) -> Path:
    """Read where a file is to be written."""
    path = Path(text)
    folder = path.absolute().parent
    if path.is_dir():
        raise ArgumentTypeError(f"{text!r} is a folder; name a file")
    if not folder.is_dir():
        raise ArgumentTypeError(f"there is no folder {folder}; make it, or name another file")
    return path


_TYPES: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "path": Path,
    "url": url,
    "key": api_key,
    "seed": seed,
    "share": share,
    "new file": new_file,
    "number": number(),
    "positive": positive(),
    "seconds": positive(DAY_S),
    "whole": whole(),
    "whole or 0": whole(0),
    "8 or more": whole(8),
    "wholes": listed(whole()),
    "rates": listed(number(1.0 / DAY_S)),
}


def add_options(
    parser: ArgumentParser, options: Mapping[str, Mapping[str, Any]], **named: str
) -> None:
    """Add options to a parser, each as argparse takes it.

    type: a name above, or module:name.  is_either: it excludes others that have this; required:
    one of them must be given.  named: by their names in the texts of help."""
    either = None
    for name, told in options.items():
        how, place = dict(told), parser.add_argument
        if is_either := how.pop("is_either", False):
            is_required = is_either == "required"
            either = either or parser.add_mutually_exclusive_group(required=is_required)
            place = either.add_argument
        if kind := how.get("type"):
            # The module of one of its own is imported for that alone.
            how["type"] = _TYPES.get(kind) or partial(_resolved, kind)
        if "help" in how:
            shown = how["help"].format(**named)
            how["help"] = SUPPRESS if shown == SUPPRESS else shown  # argparse compares by identity
        place(name, **how)


def _resolved(kind: str, text: str) -> Any:
    return pkgutil.resolve_name(kind)(text)
