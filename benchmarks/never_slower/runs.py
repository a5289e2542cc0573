"""Measures pairs of runs: plain decoding and a rival; each is stopped while the other runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from benchmarks.never_slower.figures import Cell, geometric_mean, ratios, stacks_of
from benchmarks.support.answers import Law, Result, rate_at_level
from benchmarks.support.processes import PinnedProcess
from benchmarks.support.prompts import Prompt, prompts
from benchmarks.support.record import Record, reason_of
from cluster.spec.interval import Interval

_WARM_TOKENS = 2
# Long enough for the budget to try its first step sizes; not counted.
_TRIAL_TOKENS = 12
_RANDOM_LEN = 64
_SETTLE_S = 0.3


class System(Protocol):
    """A system that continues prompts; it uses its cores only between `start` and `stop`."""

    @property
    def processes(self) -> dict[str, PinnedProcess]: ...

    def start(self) -> None: ...

    def run(
        self, prompts: Sequence[Prompt], max_tokens: int, law: Law, concurrency: int, seed: int
    ) -> Result: ...

    def stop(self) -> None: ...


class PromptSource(Protocol):
    """Provides the prompts of a cell's pair; equal for equal arguments."""

    def prompts(self, kind: str, law: str, concurrency: int, number: int) -> Sequence[Prompt]: ...


class PromptSets:
    """Gives every pair different prompts, at least as many as its concurrency."""

    def __init__(self, settings: Mapping[str, Any], tokenizer: Any) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._made: dict[str, list[Prompt]] = {}

    def prompts(self, kind: str, law: str, concurrency: int, number: int) -> Sequence[Prompt]:
        levels, laws = self._settings["concurrency"], self._settings["laws"]
        sizes = [max(self._settings["prompts"], level) for level in levels]
        place = levels.index(concurrency)
        start = sum(sizes) * (number * len(laws) + laws.index(law)) + sum(sizes[:place])
        chosen = range(start, start + sizes[place])
        if kind == "random":
            return [self._random(index) for index in chosen]
        made = self._made.get(kind, [])
        if len(made) < chosen.stop:
            made = self._made[kind] = prompts(chosen.stop, self._tokenizer, [kind])
        return made[chosen.start : chosen.stop]

    def _random(self, index: int) -> Prompt:
        ids = np.random.default_rng(index).integers(0, self._settings["vocab_size"], _RANDOM_LEN)
        return Prompt("random", "default", tuple(ids.tolist()))


class PlainAndRival:
    """The processes of plain decoding and its rival; all but one system are stopped (SIGSTOP)."""

    def __init__(self, plain: System, ours: System) -> None:
        self._systems = {"plain": plain, "ours": ours}

    def start(self) -> None:
        for system in self._systems.values():
            system.start()
            for process in system.processes.values():
                process.pause()

    @contextmanager
    def running(self, name: str) -> Iterator[System]:
        system = self._systems[name]
        processes = list(system.processes.values())
        for process in processes:
            process.resume()
        time.sleep(_SETTLE_S if processes else 0.0)
        try:
            yield system
        finally:
            for process in processes:
                process.pause()

    def stop(self) -> None:
        for system in self._systems.values():
            for process in system.processes.values():
                process.resume()  # a stopped process does not handle SIGTERM
            system.stop()


def measure(
    record: Record,
    cells: Sequence[Cell],
    laws: Mapping[str, Law],
    library: PromptSource,
    processes_of: Callable[[str], PlainAndRival],
) -> None:
    """Measure the missing pairs.  processes_of: creates the processes of a stack, not yet started.

    A stack that fails is recorded and skipped; one whose geometric mean is known closely enough
    gets no further pairs.
    """
    num_pairs, turn = record.settings["pairs"], record.settings["turn"]
    for first in range(0, num_pairs, turn):
        numbers = range(first, min(first + turn, num_pairs))
        for stack in dict.fromkeys(cell.stack for cell in cells):
            missing = [
                (cell, number)
                for number in numbers
                for cell in cells
                if cell.stack == stack and number >= len(record.results.get(cell.key, ()))
            ]
            if not missing or stack in record.failures or _is_known(stack, record):
                continue
            rivals = processes_of(stack)
            try:
                rivals.start()
                _warm_up(rivals, [cell for cell, _ in missing], laws, library)
                for cell, number in missing:
                    asked = library.prompts(cell.kind, cell.law, cell.concurrency, number)
                    pair = _pair(rivals, asked, laws[cell.law], cell, number, record.settings)
                    found = [*record.results.get(cell.key, ()), pair]
                    record.add(cell.key, found)
                    _progress(cell, found)
            except (RuntimeError, OSError) as error:
                record.failures[stack] = reason_of(error)
                print(f"{stack} failed and is left out: {error}", file=sys.stderr, flush=True)
            finally:
                rivals.stop()


def _is_known(stack: str, record: Record) -> bool:
    """True if the interval of the stack's mean reaches no further than `until` to each side."""
    found = stacks_of(record.results).get(stack)
    mean = geometric_mean(found) if found else None
    return bool(mean and mean.high and mean.high / mean.mean - 1.0 <= record.settings["until"])


def _warm_up(
    rivals: PlainAndRival, cells: Sequence[Cell], laws: Mapping[str, Law], library: PromptSource
) -> None:
    """Run every batch size once, uncounted: the first step of a shape may compile or load code."""
    seen: set[tuple[str, int]] = set()
    for cell in cells:
        if (cell.law, cell.concurrency) in seen:
            continue
        seen.add((cell.law, cell.concurrency))
        # Prompts that no measurement uses: random ones, shifted by a token.
        asked = [
            Prompt(each.kind, each.task, each.token_ids[1:])
            for each in library.prompts("random", cell.law, cell.concurrency, 0)
        ]
        for name in ("plain", "ours"):
            with rivals.running(name) as system:
                system.run(asked, _TRIAL_TOKENS, laws[cell.law], cell.concurrency, 0)


def _pair(
    rivals: PlainAndRival,
    asked: Sequence[Prompt],
    law: Law,
    cell: Cell,
    number: int,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Run both once, after filling their prefix caches with the prompts."""
    names = ("plain", "ours") if number % 2 == 0 else ("ours", "plain")
    results: dict[str, Result] = {}
    pair: dict[str, Any] = {"first": names[0], "at": time.strftime("%Y-%m-%dT%H:%M:%S")}
    for name in names:
        with rivals.running(name) as system:
            system.run(asked, _WARM_TOKENS, law, cell.concurrency, number)
            drafters = [
                process
                for role, process in system.processes.items()
                if role not in ("target", "lead")
            ]
            before_s = _cpu_s(drafters)
            result = system.run(asked, settings["max_tokens"], law, cell.concurrency, number)
            results[name] = result
            pair[f"{name}_s"] = elapsed_s(result)
            level = min(cell.concurrency, len(asked))
            pair[f"{name}_rate"] = rate_at_level(result.answers, level)
            if name == "ours":
                pair["drafters_cpu_s"] = _cpu_s(drafters) - before_s
    both = zip(results["plain"].answers, results["ours"].answers, strict=True)
    pair["tokens"] = sum(len(answer.token_ids) for answer in results["plain"].answers)
    pair["differing_answers"] = sum(one.token_ids != other.token_ids for one, other in both)
    acceptance = results["ours"].acceptance
    pair["mean_acceptance_length"] = acceptance.mean_length if acceptance else None
    return pair


def _cpu_s(processes: Sequence[PinnedProcess]) -> float:
    return sum(process.cpu_s() for process in processes)


def elapsed_s(result: Result) -> float:
    """Seconds from the first submission to the last token."""
    asked_s = min(answer.submitted_s for answer in result.answers)
    return max(answer.events[-1][0] for answer in result.answers) - asked_s


def _progress(cell: Cell, pairs: Sequence[Mapping[str, Any]]) -> None:
    found = Interval.of_strata([ratios(pairs)])
    last = ratios(pairs[-1:])[0]
    print(
        f"{cell.key:28} pair {len(pairs)}  {last:6.3f}  mean {found.mean:6.3f}",
        file=sys.stderr,
        flush=True,
    )
