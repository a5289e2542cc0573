"""The pairs measured so far, on disk after each, so that a run that was cut off goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.never_slower_figures import summarise
from benchmarks.serving import ROOT, machine

_PACKAGES = ("torch", "transformers", "numpy", "grpcio")
# May be changed from run to run: they say how much is measured, not what.
_FREE = ("pairs",)


class Ledger:
    """cells: pairs by the key of their cell, in the order of their numbers."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, fresh: bool = False) -> None:
        """Goes on with what `path` holds; ValueError where that was measured with other settings.

        fresh: forget what it holds.
        """
        self.path = path
        self.settings = dict(settings)
        self.cells: dict[str, list[dict[str, Any]]] = {}
        self.failures: dict[str, str] = {}
        if path.exists() and not fresh:
            former = json.loads(path.read_text("utf-8"))
            differing = [
                name
                for name, value in self.settings.items()
                if name not in _FREE and former["settings"].get(name) != value
            ]
            if differing:
                raise ValueError(
                    f"{path} was measured with other {', '.join(differing)}; name another file "
                    "with --out, or start anew with --fresh"
                )
            self.cells = former["cells"]

    def has(self, key: str, number: int) -> bool:
        return number < len(self.cells.get(key, ()))

    def add(self, key: str, pair: Mapping[str, Any]) -> None:
        self.cells.setdefault(key, []).append({**pair, "commit": commit()})
        self.save()

    def save(self) -> dict[str, Any]:
        """Write all with its summary; returns what was written."""
        commits = {pair["commit"]: None for pairs in self.cells.values() for pair in pairs}
        document = {
            "command": " ".join(["python", "-m", "benchmarks.never_slower", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "versions": _versions(),
            "commits": list(commits),
            "settings": self.settings,
            "failures": self.failures,
            "summary": summarise(self.cells),
            "cells": self.cells,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: a run that is cut off here is to be resumed.
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        partial.replace(self.path)
        return document


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit that is checked out, with a + where files differ from it; "" without git."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
