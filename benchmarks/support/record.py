"""Writes results: a small report that is committed, and the raw results beside it.

NAME.json holds command, date, machine, versions, settings and summary.  NAME.raw.json holds every
result, so that the same command continues an interrupted run; git ignores it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cluster.models.cache import write_whole

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "benchmarks"
_WIDTH = 160  # of a line: a row of a record has a dozen figures
_PACKAGES = ("drafthouse", "torch", "transformers", "numpy", "grpcio", "ray")


class Record:
    """Results by key, saved after each one.

    failures: why a system could not be measured, by its name.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        *,
        free: Sequence[str] = (),
        fresh: bool = False,
    ) -> None:
        """Continues from the raw results beside `path`; `fresh` ignores them.

        free: settings that say how much is measured, not what, and may change in between.
        Raises ValueError if the raw results have other settings.
        """
        self.path = path
        self.settings = dict(settings)
        self.results: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self._commits: list[str] = []
        self._raw_path = path.with_suffix(".raw.json")
        if self._raw_path.exists() and not fresh:
            former = json.loads(self._raw_path.read_text("utf-8"))
            differing = [
                name
                for name, value in self.settings.items()
                if name not in free and former["settings"].get(name) != value
            ]
            if differing:
                raise ValueError(
                    f"{self._raw_path} was measured with other {', '.join(differing)}; name "
                    "another file with --out, or start anew with --fresh"
                )
            self.results, self._commits = former["results"], former["commits"]

    def add(self, key: str, result: Any) -> None:
        self.results[key] = result
        self.save()

    def save(self) -> None:
        """Write the raw results, with the commit that is checked out now."""
        if (now := commit()) not in self._commits:
            self._commits.append(now)
        raw = {"settings": self.settings, "commits": self._commits, "results": self.results}
        write_whole(self._raw_path, json.dumps(raw) + "\n")

    def publish(self, summary: Any, **more: Any) -> dict[str, Any]:
        """Write the report; returns it."""
        return write_report(
            self.path,
            {
                "commits": self._commits,
                "settings": self.settings,
                "failures": self.failures,
                **more,
                "summary": summary,
            },
        )


def write_report(path: Path, report: Mapping[str, Any]) -> dict[str, Any]:
    """Write `report` with its command, date, machine and versions as JSON; returns all of it."""
    document = {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        **report,
    }
    write_whole(path, rows(document) + "\n")
    return document


def show_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report as `write_report` does, and print it."""
    print(rows(write_report(path, report)))


def rows(value: Any, level: int = 0) -> str:
    """Return plain values as JSON: values without parts share a line, and so do parts that fit."""
    flat = json.dumps(value)
    parts = list(value.values() if isinstance(value, dict) else value) if _has_parts(value) else []
    if not any(map(_has_parts, parts)) or (level and len(flat) + level <= _WIDTH):
        return flat
    lines: list[str] = []
    was_plain = False
    for name, each in value.items() if isinstance(value, dict) else enumerate(value):
        said = rows(each, level + 1)
        said = f"{json.dumps(name)}: {said}" if isinstance(value, dict) else said
        is_plain = not _has_parts(each)
        if is_plain and was_plain:
            lines[-1] += f", {said}"
        else:
            lines.append(said)
        was_plain = is_plain
    inner = "\n" + " " * (level + 1)
    return flat[0] + inner + f",{inner}".join(lines) + "\n" + " " * level + flat[-1]


def _has_parts(value: Any) -> bool:
    return isinstance(value, dict | list) and len(value) > 0


def asked_of_gpu(asked: str) -> str:
    """What nvidia-smi says of the first GPU; raises OSError and SubprocessError."""
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return (said.splitlines() or [""])[0].strip()


def command() -> str:
    """The command line, without the folders of this machine."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return " ".join(["python -m", module, *words])


def machine() -> dict[str, Any]:
    """A description of the machine of the measurement."""
    named = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"))
    model = named[1] if named else platform.processor()
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


def versions() -> dict[str, str]:
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


def reason_of(error: BaseException) -> str:
    """The last line of a failure's message, for a record.

    The lines above it are a process's log, which contains paths of this machine.
    """
    if isinstance(error, BaseExceptionGroup):
        return reason_of(error.exceptions[0])
    lines = str(error).splitlines()
    return lines[-1] if lines else type(error).__name__
