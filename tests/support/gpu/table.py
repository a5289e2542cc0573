"""The committed table of what the engine asks of a GPU, and what has changed against it.

It is a ratchet: a number that rises is a fault, and one that falls is to be written down, so that
it does not rise again unseen.
"""

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("table.json")
_PACKAGES = ("torch", "transformers", "triton")
# More of these is better.
_BETTER = {"wide", "mma"}
_BETTER_PARTS = ("steps in graphs",)

Table = Mapping[str, Any]


def versions() -> dict[str, str]:
    """Of the packages that the numbers depend on; builds of torch differ in what they run on."""
    return {name: version(name).partition("+")[0] for name in _PACKAGES}


def read() -> Table:
    return json.loads(PATH.read_text("utf-8"))


def write(table: Table) -> None:
    PATH.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def changes(found: Table, held: Table, where: str = "") -> Iterator[str]:
    """A line for each number that is another than in the table, or has no place in it."""
    for name, value in found.items():
        place, before = f"{where}{name}", held.get(name)
        if isinstance(value, Mapping):
            yield from changes(value, before or {}, f"{place}: ")
        elif before is None:
            yield f"{place}: {value}, which is not in the table"
        elif value != before:
            is_better = name in _BETTER or place.startswith(_BETTER_PARTS)
            is_worse = value < before if is_better else value > before
            yield f"{place}: {before} -> {value}{', which is worse' if is_worse else ''}"
