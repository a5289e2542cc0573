"""Judges the control loop without a clock.

    python -m benchmarks.replay TEXTS [--json OUT] [--machines cpu] [--sizes 1,16] ...
    python -m benchmarks.replay TEXTS --set draft_length.kind=window --set budget=fixed

TEXTS: recorded by `benchmarks.replay.record`.  Every cell plays the texts through the target's own
controller in virtual time, and through plain decoding and fixed budgets of 1 to 16 nodes.
--set: the controller with other settings of `coordinator`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.replay.grid import BEHAVIOURS, LAWS, PLACES, SIZES, Bench, Found, cells
from benchmarks.replay.machines import MACHINES
from benchmarks.support.options import DEMO_CONFIG, add_options, parser_of
from benchmarks.support.record import rows
from cluster.config.file import load as load_config
from cluster.simulate.world import load


def row(found: Found) -> str:
    cell = found.cell
    return (
        f"| {cell.machine} | {cell.place} | {cell.behaviour} | {cell.law} | {cell.num_sequences} "
        f"| {found.best:.2f} ({found.best_nodes}) | {found.adaptive:.2f} | {found.of_best:.2f} |"
    )


HEADER = (
    "| machine | drafters | behaviour | law | requests | best fixed (nodes) "
    "| adaptive | of the best |\n|" + "---|" * 8
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("texts", type=Path)
    add_options(
        parser,
        json=(Path, "write all that was found there"),
    )
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="K=V")
    add_options(
        parser,
        models=("lm", "recorded drafters that are no look-ups, by commas"),
    )
    choices = {
        "machines": tuple(MACHINES),
        "places": tuple(PLACES),
        "behaviours": BEHAVIOURS,
        "laws": tuple(LAWS),
        "sizes": tuple(map(str, SIZES)),
    }
    for name, known in choices.items():
        parser.add_argument(f"--{name}", default=",".join(known), help="separated by commas")
    options = parser.parse_args(arguments)
    wanted = {}
    for name, known in choices.items():
        wanted[name] = getattr(options, name).split(",")
        unknown = [each for each in wanted[name] if each not in known]
        if unknown:
            parser.error(f"--{name}: {unknown[0]} is none of {', '.join(known)}")
    chosen = list(
        cells(
            wanted["machines"],
            wanted["places"],
            wanted["behaviours"],
            wanted["laws"],
            [int(size) for size in wanted["sizes"]],
        )
    )
    overrides = [f"coordinator.{each}" for each in options.overrides]
    config = load_config(DEMO_CONFIG, overrides).config.coordinator if overrides else None
    bench = Bench(load(options.texts), models=frozenset(options.models.split(",")), config=config)
    found = [bench.run(cell) for cell in tqdm(chosen, file=sys.stderr)]
    print(HEADER)
    for each in found:
        print(row(each))
    if options.json:
        options.json.write_text(rows([each.record() for each in found]) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
