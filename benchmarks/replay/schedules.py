"""Compares draft-length schedules without a clock.

    python -m benchmarks.replay.schedules TEXTS [--machines cpu,gpu] [--sizes 1,16]

Every cell is played by the target's own controller as it is, and with each schedule in two ways:
below the adaptive budget, where it only lowers what that chooses, and with the fixed budget, as
other servers use it.  A cell's speed is the mean of some runs with other orders of the texts.
Exit status 1 if adaptive is below 0.98 of the best schedule of a cell.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.replay.grid import LAWS, Bench, Cell, cells
from cluster.config.draft_length import DraftLengthConfig
from cluster.config.schema import CoordinatorConfig
from cluster.simulate.texts import load

BAR = 0.98
_SEEDS = range(12)
SCHEDULES: Mapping[str, DraftLengthConfig] = {
    **{
        f"constant {count}": DraftLengthConfig(kind="constant", num_tokens=count)
        for count in (2, 5, 8)
    },
    "heuristic": DraftLengthConfig(kind="heuristic"),
    "window": DraftLengthConfig(kind="window"),
    "threshold 0.4": DraftLengthConfig(kind="threshold"),
    "alpha": DraftLengthConfig(kind="alpha"),
}


def configs() -> dict[str, CoordinatorConfig]:
    """Every schedule in both ways, and adaptive first."""
    found = {"adaptive": CoordinatorConfig()}
    for name, schedule in SCHEDULES.items():
        found[name] = CoordinatorConfig(draft_length=schedule)
        found[f"{name}, fixed"] = CoordinatorConfig(budget="fixed", draft_length=schedule)
    return found


def speeds(bench: Bench, cell: Cell) -> dict[str, float]:
    """Return the speed of each schedule in a cell, in plain decoding's."""
    return {
        name: float(np.mean([bench.speed(cell, config, seed) for seed in _SEEDS]))
        for name, config in configs().items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.replay.schedules", description=__doc__)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--machines", default="cpu,amx,gpu", help="separated by commas")
    parser.add_argument("--places", default="resident", help="of the drafters, likewise")
    parser.add_argument("--sizes", default="1,4,16,32", help="numbers of requests, likewise")
    parser.add_argument("--models", default="lm", help="as of benchmarks.replay")
    options = parser.parse_args(arguments)
    bench = Bench(load(options.texts), models=frozenset(options.models.split(",")))
    sizes = [int(size) for size in options.sizes.split(",")]
    chosen = list(
        cells(options.machines.split(","), options.places.split(","), ["good"], tuple(LAWS), sizes)
    )
    names = [name for name in configs() if not name.endswith("fixed")]
    print(f"| machine | drafters | law | requests | {' | '.join(names)} | of the best |")
    print("|" + "---|" * (5 + len(names)))
    worst = 1.0
    for cell in tqdm(chosen, file=sys.stderr):
        found = speeds(bench, cell)
        best = max(speed for name, speed in found.items() if name != "adaptive")
        worst = min(worst, found["adaptive"] / best)
        told = " | ".join(
            f"{found[name]:.2f}" + (f" ({found[fixed]:.2f})" if fixed in found else "")
            for name, fixed in ((name, f"{name}, fixed") for name in names)
        )
        print(
            f"| {cell.machine} | {cell.place} | {cell.law} | {cell.num_sequences} | {told} "
            f"| {found['adaptive'] / best:.3f} |",
            flush=True,
        )
    return int(worst < BAR)


if __name__ == "__main__":
    raise SystemExit(main())
