"""Coding agents as clients: each edits a file and runs a command, as a script has its model say."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.clients.environments import Environments, Unavailable
from benchmarks.clients.running import Row
from tests.support.agents.plan import Agent
from tests.support.agents.running import run

_CHECK = "reads and edits a file, runs a command"


def row_of_agent(agent: Agent, environments: Environments, work: Path) -> Row:
    """Install the agent and run it; work: a folder of its own."""
    try:
        folder = environments.folder(agent.name, (agent.package,), is_of_npm=agent.is_of_npm)
    except Unavailable as reason:
        return Row("-", "-", "not run", str(reason))
    started_at = time.perf_counter()
    outcome = run(agent, folder.absolute(), work)
    took_s = round(time.perf_counter() - started_at, 1)
    note = " ".join("; ".join(outcome.problems()).split())[:600]
    return Row(agent.version, _CHECK, "failed" if note else "passed", note, took_s)
