"""Runs one client's checks, and ends within the time limits whatever the client does."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.clients.environments import Environments, Unavailable, version
from benchmarks.clients.plan import Client, Command, Setting
from benchmarks.support.processes import run_to_end
from cluster.records import frozen

# Number of lines at the end of a failed command's output that are shown.
_TAIL = 5
# Nothing is downloaded: tokenizers are folders, and telemetry is off.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "OPENAI_API_KEY": "none",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_COLOR": "1",
    "COLUMNS": "160",
}


@frozen
class Row:
    """One check.  result: "passed", "failed" or "not run".  note: the reason if it did not pass."""

    version: str
    check: str
    result: str
    note: str = ""
    seconds: float = 0.0

    @property
    def is_failure(self) -> bool:
        """True if it failed without an explanation in the plan."""
        return self.result == "failed" and not self.note.startswith("explained: ")


def rows_of(
    client: Client, environments: Environments, setting: Setting, only: str = ""
) -> list[Row]:
    """Run all checks of `client`, or the command `only`; a client that cannot run gives one row."""
    try:
        folder = environments.bin(client)
    except Unavailable as reason:
        return [Row("-", "-", "not run", str(reason))]
    shown = version(folder, client.package)
    if client.script is not None:
        found = _scripted(client, folder, shown, setting)
    else:
        assert not isinstance(client.checks, str)
        found = [
            _commanded(client, one, folder, shown, setting)
            for one in client.checks
            if only in ("", one.check)
        ]
    return [_explained(client, row) for row in found]


def _scripted(client: Client, folder: Path, shown: str, setting: Setting) -> list[Row]:
    words = [str(folder / "python"), str(client.script), setting.url, setting.model]
    status, output = _run(words, setting.work, client)
    rows = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            record: Any = json.loads(line)
            if isinstance(record, dict) and "check" in record:
                error = record["error"]
                result = "failed" if error else "passed"
                rows.append(
                    Row(shown, record["check"], result, _one_line(error), record["seconds"])
                )
    if status != 0:  # None of the checks ends the script: it fell over, or hung.
        rows.append(Row(shown, "all of the script", "failed", _end(output, status)))
    return rows


def _commanded(client: Client, one: Command, folder: Path, shown: str, setting: Setting) -> Row:
    program, *words = one.words(setting)
    started_at = time.perf_counter()
    status, output = _run([str(folder / program), *words], setting.work, client)
    row = Row(shown, one.check, "passed", "", round(time.perf_counter() - started_at, 1))
    if status != 0:
        return replace(row, result="failed", note=_end(output, status))
    missing = [text for text in one.shows if text not in output]
    if missing:
        return replace(row, result="failed", note=f"its output lacks {missing[0]!r}")
    return row


def _explained(client: Client, row: Row) -> Row:
    reason = client.explained.get(row.check)
    if row.result != "failed" or reason is None:
        return row
    return replace(row, note=f"explained: {reason}")


def _run(words: Sequence[str], work: Path, client: Client) -> tuple[int | None, str]:
    work.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **_ENVIRONMENT, **client.environment}
    return run_to_end(words, work, environment, work / "output.log", client.timeout_s)


def _end(output: str, status: int | None) -> str:
    how = "it took too long" if status is None else f"exit status {status}"
    # Strip the frames that some clients draw around their messages.
    lines = [line.strip(" │╭╰─╮╯") for line in output.splitlines()]
    lines = [line for line in lines if line]
    return _one_line(f"{how}: {' / '.join(lines[-_TAIL:])}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:600]
