"""Texts for people, whose layout stands in templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2


def printed(name: str, told: Mapping[str, Any], *, as_json: bool) -> str:
    """Return what a command prints: one JSON object, or the text of its template."""
    return json.dumps(told, indent=2) + "\n" if as_json else rendered(name, told)


def rendered(name: str, told: Mapping[str, Any]) -> str:
    """Return the template NAME.jinja, by its path below this folder, with what is told."""
    return _templates().get_template(f"{name}.jinja").render(told, size=size)


@cache
def _templates() -> jinja2.Environment:
    """It keeps those that are compiled."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
