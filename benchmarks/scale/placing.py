"""Measures what placement is worth: prefix hits of conversations, and how pure batches are.

    python -m benchmarks.scale.placing

Coordinators are real, targets are null ones with a page cache that forgets what was used longest
ago; all run in one process.  Conversations are made from a seed: some system prompts that many
share, then turns, each of which continues the conversation so far.  As many run at once as fill a
share of the seats.  Requests go to the coordinator that has least in hand, as from an ingress.

Prefix hits are the share of prompt tokens that a target had when a text was opened.  Purity is the
share of rows that belong to the task which has most of them in their step; a coordinator's texts
count as a step of their own.  Without grouping the same requests name no task.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.rounds.null_workers import VOCABULARY, NullTarget, text
from benchmarks.support.options import numbers, parser_of
from benchmarks.support.record import OUT, show_report
from cluster.config.schema import Config, CoordinatorConfig
from cluster.coordinator.coordinator import Coordinator
from cluster.core import Request, SamplingParams, TokenArray
from cluster.messages import Load, Open, StepFrame, VerdictFrame, WorkerDescription
from cluster.rpc.link import Link
from cluster.rpc.memory import memory_pair

_PAGE = 16
_TASKS = ("code", "prose", "math")
_NUM_SYSTEM_PROMPTS = 4
_STEPS_PER_LOAD = 20  # a target says how busy it is once a second, which is about as often


@dataclass
class PageCache:
    """A target's, with hits of the prompts that were looked up."""

    num_pages: int
    num_asked: int = 0
    num_held: int = 0
    _pages: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def open(self, prompt: TokenArray, answer: TokenArray) -> None:
        """Count what is there of the prompt, and keep the pages of both."""
        tokens = np.concatenate([prompt, answer])
        keys, key = [], 0
        for end in range(_PAGE, len(tokens) + 1, _PAGE):
            key = hash((key, tokens[end - _PAGE : end].tobytes()))
            keys.append(key)
        num_whole = (len(prompt) - 1) // _PAGE  # the last token is always computed
        held = next((n for n in range(num_whole) if keys[n] not in self._pages), num_whole)
        self.num_asked += len(prompt)
        self.num_held += held * _PAGE
        for each in reversed(keys):
            self._pages[each] = None
            self._pages.move_to_end(each)
        while len(self._pages) > self.num_pages:
            self._pages.popitem(last=False)


class CachingTarget:
    """Serves any number of coordinators; their texts share its seats and its cache."""

    def __init__(self, seats: int, num_pages: int) -> None:
        self.cache = PageCache(num_pages)
        self.seats = seats
        self.num_rows = 0
        self.num_of_most = 0  # those of the task that has most in their step
        self.streams: list[_Texts] = []

    def describe(self) -> WorkerDescription:
        return NullTarget().describe(self.seats)

    async def serve(self, link: Link[VerdictFrame, StepFrame]) -> None:
        stream = _Texts(self)
        self.streams.append(stream)
        await stream.serve(link)

    def load(self) -> Load:
        running = sum(stream.num_texts for stream in self.streams)
        share = -(-self.seats // len(self.streams))
        return Load(seats=share, num_running=running, pages_total=self.cache.num_pages)


class _Texts(NullTarget):
    """Those of one coordinator."""

    def __init__(self, owner: CachingTarget) -> None:
        super().__init__()
        self._owner = owner
        self._num_steps = 0

    @property
    def num_texts(self) -> int:
        return len(self._lengths)

    def open(self, opened: Open) -> None:
        super().open(opened)
        length = len(opened.token_ids)
        self._owner.cache.open(opened.token_ids, text(length, opened.max_len - length))

    def answer(self) -> VerdictFrame:
        tasks = Counter(name.request_id.partition("-")[0] for name in self._lengths)
        self._owner.num_rows += tasks.total()
        self._owner.num_of_most += max(tasks.values())
        frame = super().answer()
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_LOAD:
            return frame
        return VerdictFrame(
            frame.verdicts, report=frame.report, serial=frame.serial, load=self._owner.load()
        )


@dataclass(frozen=True, slots=True)
class Case:
    """load: running conversations over seats.  is_grouped: requests name their task."""

    num_targets: int
    num_coordinators: int
    load: float
    is_grouped: bool = True


class _Speakers:
    """Conversations, one after another and several at once."""

    def __init__(self, coordinators: Sequence[Coordinator], *, is_grouped: bool, seed: int) -> None:
        self._coordinators = coordinators
        self._in_hand = [0] * len(coordinators)
        self._is_grouped = is_grouped
        self._seed = seed
        choice = random.Random(seed)
        self._systems = [_said(choice, 100, 400) for _ in range(_NUM_SYSTEM_PROMPTS)]

    async def speak(self, numbers_left: list[int]) -> None:
        """Hold conversations until there are no more numbers of them."""
        while numbers_left:
            number = numbers_left.pop()
            choice = random.Random(f"{self._seed} {number}")
            task, history = choice.choice(_TASKS), choice.choice(self._systems)
            for turn in range(choice.randint(2, 8)):
                history = np.concatenate([history, _said(choice, 20, 200)])
                num_tokens = choice.randint(20, 80)
                await self._ask(f"{task}-{number}-{turn}", history, num_tokens, task)
                history = np.concatenate([history, text(len(history), num_tokens)])

    async def _ask(self, name: str, prompt: TokenArray, num_tokens: int, task: str) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        asked = Request(name, prompt, params, task=task if self._is_grouped else "default")
        place = min(range(len(self._in_hand)), key=self._in_hand.__getitem__)
        self._in_hand[place] += 1
        async for event in self._coordinators[place].submit(asked):
            if event.error_code:
                raise RuntimeError(event.error_message)
        self._in_hand[place] -= 1


def _said(choice: random.Random, low: int, high: int) -> TokenArray:
    count = choice.randint(low, high)
    return np.array(choice.choices(range(VOCABULARY), k=count), dtype=np.int32)


async def _run(case: Case, arguments: argparse.Namespace) -> list[CachingTarget]:
    seats, pages = arguments.seats // case.num_targets, arguments.pages // case.num_targets
    targets = [CachingTarget(seats, pages) for _ in range(case.num_targets)]
    config = Config(coordinator=CoordinatorConfig(replicas=case.num_coordinators))
    coordinators = [Coordinator(config) for _ in range(case.num_coordinators)]
    tasks = []
    for coordinator in coordinators:
        await coordinator.start()
        for number, target in enumerate(targets):
            ours, theirs = memory_pair()
            tasks.append(asyncio.create_task(target.serve(theirs)))
            coordinator.add_target(str(number), target.describe(), ours)
    speakers = _Speakers(coordinators, is_grouped=case.is_grouped, seed=arguments.seed)
    left = list(range(arguments.conversations))
    await asyncio.gather(*(speakers.speak(left) for _ in range(round(case.load * arguments.seats))))
    for coordinator in coordinators:
        await coordinator.stop()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return targets


def measure(case: Case, arguments: argparse.Namespace) -> dict[str, float]:
    """Run one case."""
    targets = asyncio.run(_run(case, arguments))
    asked = sum(each.cache.num_asked for each in targets)
    held = sum(each.cache.num_held for each in targets)
    of_most = sum(each.num_of_most for each in targets)
    return {
        "prompt tokens": asked,
        "prefix hits": round(held / asked, 4),
        "purity": round(of_most / sum(each.num_rows for each in targets), 3),
    }


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--targets", type=numbers, default=[1, 4])
    add("--coordinators", type=numbers, default=[1, 4])
    add("--loads", type=numbers, default=[50, 90], help="running conversations, percent of seats")
    add("--seats", type=int, default=64, help="of all targets together")
    add("--pages", type=int, default=32768, help="of all targets' caches together")
    add("--conversations", type=int, default=400)
    add("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report: dict[str, Any] = {}
    for load in arguments.loads:
        for count in arguments.coordinators:
            for targets in arguments.targets:
                for is_grouped in (True, False):
                    key = (
                        f"{load} % load, {count} coordinators, {targets} targets, "
                        f"{'with' if is_grouped else 'without'} grouping"
                    )
                    report[key] = measure(Case(targets, count, load / 100, is_grouped), arguments)
                    print(key, report[key], file=sys.stderr, flush=True)
    show_report(OUT / "scale/placing.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
