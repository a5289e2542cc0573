"""Judges `speculation.min_tokens_per_s` without a clock: whose rate is missed, and what it costs.

    python -m benchmarks.replay.service TEXTS [--machines cpu,amx] [--prompts]

Sixteen texts of all tasks run side by side, and every second one is to have a rate: a multiple of
what plain decoding gives each of them.  A text misses it if it was slower from its first token to
its last.  The same texts are played without rates first.  Prompts are in the prefix cache, because
no draft makes up for the time of a prompt that is read in between; with --prompts they are read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.replay.grid import Bench, Cell
from benchmarks.replay.machines import MACHINES
from cluster.simulate.replay import Playing, Step, Timed
from cluster.simulate.texts import load
from cluster.simulate.world import Machine, Pool

NUM_TEXTS = 16
# Multiples of plain decoding's rate.
RATES = (0.9, 0.95, 1.0, 1.1)
_SECONDS = 10.0
_SEEDS = range(4)


class Served(Timed):
    """The target's own controller; every second text is to have a rate."""

    def __init__(self, machine: Machine, pool: Pool, rate: float) -> None:
        super().__init__(machine, pool)
        self._rate = rate

    def plan(self, batch: Sequence[Playing], now: float, prompt_rows: int) -> Step:
        for own in batch:
            if _is_served(own):
                own.text.min_tokens_per_s = self._rate
        return super().plan(batch, now, prompt_rows)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of the texts with a rate that have ended, behind their first ones."""
        return [(own.position - 1) / time_s for own, time_s in self.ended if _is_served(own)]


def _is_served(own: Playing) -> bool:
    return int(own.text.id) % 2 == 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Shares of the served texts that miss their rate, with it and without.

    of_speed: the speed of all texts, in that without rates.
    """

    missed: float
    missed_without: float
    of_speed: float


def judge(
    bench: Bench, cell: Cell, multiples: Sequence[float], seeds: Sequence[int] = _SEEDS
) -> list[Outcome]:
    """Play a cell without rates, and with each of these multiples of plain decoding's."""
    machine, pool = MACHINES[cell.machine], bench.pool_of(cell)
    plain = 1.0 / machine.step_s(cell.num_sequences, cell.num_sequences)

    def run(rate: float) -> tuple[float, np.ndarray]:
        speeds, rates = [], []
        for seed in seeds:
            policy = Served(machine, pool, rate)
            speeds.append(bench.play(cell, policy, pool, _SECONDS, seed).speed)
            rates += policy.rates
        return float(np.mean(speeds)), np.array(rates)

    usual, without = run(0.0)
    found = []
    for multiple in multiples:
        speed, rates = run(multiple * plain)
        missed, missed_without = (
            float((each < multiple * plain).mean()) for each in (rates, without)
        )
        found.append(Outcome(missed, missed_without, speed / usual))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.replay.service", description=__doc__)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--machines", default="cpu,amx,gpu", help="separated by commas")
    parser.add_argument("--places", default="resident,own-2", help="of the drafters, likewise")
    parser.add_argument("--models", default="lm", help="as of benchmarks.replay")
    parser.add_argument("--prompts", action="store_true", help="prompts are read")
    options = parser.parse_args(arguments)
    texts = load(options.texts)
    if not options.prompts:
        texts = [replace(text, prompt_len=1) for text in texts]
    bench = Bench(texts, models=frozenset(options.models.split(",")))
    cells = [
        Cell(machine, place, "good", law, NUM_TEXTS)
        for machine in options.machines.split(",")
        for place in options.places.split(",")
        for law in ("greedy", "sampled")
    ]
    titles = "".join(f" {rate:g} |" for rate in RATES)
    print(f"| machine | drafters | law |{titles}\n|" + "---|" * (3 + len(RATES)))
    for cell in tqdm(cells, file=sys.stderr):
        told = "".join(
            f" {each.missed_without:.0%} → {each.missed:.0%}, {each.of_speed:.3f} |"
            for each in judge(bench, cell, RATES)
        )
        print(f"| {cell.machine} | {cell.place} | {cell.law} |{told}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
