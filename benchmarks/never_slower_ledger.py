"""The pairs measured so far, saved after each one, so that an interrupted run can continue."""

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
# Settings that may change between runs: they determine how much is measured, not what.
_FREE = ("pairs",)


class Ledger:
    """cells: pairs by the key of their cell, ordered by number."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, fresh: bool = False) -> None:
        """Continue from `path`; raises ValueError if it was measured with other settings.

        fresh: ignore its contents.
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
        """Write all pairs with their summary; returns the document."""
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
        # Written atomically, so that a run that is interrupted here can be resumed.
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
    """The checked-out commit, with a + if files differ from it; "" without git."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
