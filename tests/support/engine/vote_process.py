"""One of two ranks that settle on their attention, and whose collectives then time out.

python -m tests.support.engine.vote_process RANK ADDRESS FOLDER SCENARIO...; prints a line of JSON
for each scenario.  Then rank 1 is late.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

from cluster.engine.parallel import RankGroup
from cluster.engine.step import Forward
from cluster.errors import ConfigError, WorkerError
from tests.support.engine.driver import load_engine
from tests.support.engine.ranks import joined, say

# Short, so that a rank is late by more than it, and the test is not slow.
TIMEOUT_S = 1.0
SCENARIOS = ("one", "right", "chosen", "never")


def main() -> None:
    with joined(TIMEOUT_S, loading_s=120.0) as (rank, (folder, *scenarios)):
        group = RankGroup()
        for scenario in scenarios:
            _settle(group, scenario, rank, Path(folder))
        _late(group, rank)


def _settle(group: RankGroup, scenario: str, rank: int, folder: Path) -> None:
    """The first check of rank 1 fails; of none where the scenario is "right"."""
    attention = "native" if scenario == "chosen" else "auto"
    engine = load_engine(folder, attention=attention)
    forward = Forward(engine.config, engine.model, engine.cache, group.all)
    wrong = ConfigError("a layer is wrong")
    first = None if scenario == "right" or rank == 0 else wrong
    check = Mock(side_effect=[first, wrong if scenario == "never" else None])
    say(json.dumps(_outcome(forward, check) | {"checks": check.call_count}))


def _outcome(forward: Forward, check: Callable[[], None]) -> dict[str, object]:
    try:
        forward.settle(check)
    except ConfigError as error:
        return {"error": error.message}
    return {"attention": forward.attention, "fallbacks": list(forward.fallbacks)}


def _late(group: RankGroup, rank: int) -> None:
    """Rank 1 loads for longer than a collective may take, and then ends no collective."""
    if rank == 1:
        time.sleep(2 * TIMEOUT_S)
    group.end_loading(1)
    say("loaded")
    if rank == 1:
        sys.stdin.readline()  # until the test has what it waits for
        return
    try:
        with group.agreeing(1, "what this step is to run"):
            pass
    except WorkerError as error:
        say(error.code)


if __name__ == "__main__":
    main()
