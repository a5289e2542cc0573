"""Many targets under one load, text by text, in virtual time.

Every target and every text is simulated; steps are not.  A text's decoding advances at the speed
that the replay has found for it beside so many others (`cluster.simulate.replay`).  A prompt
takes the time of its rows by the profile, which everybody at that target waits for.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.records import frozen
from cluster.simulate.replay import DecodeTimes
from cluster.simulate.settings import Scene

# Of a text's decoding, what rounding may leave at its end.
_DONE = 1e-9


@dataclass(slots=True)
class SimulatedText:
    """A text at a target, or one that has ended there; times are those of the virtual clock.

    number, num_tokens: of the recorded one.  lag_s: of one that is new, the seconds until its
    prompt is read, from the moment on up to which the others are known; then 0.  left: the share of
    its decoding that is still to be done; more than 1 while its prompt is being read.
    """

    number: int
    num_tokens: int
    asked_at: float
    first_at: float
    lag_s: float
    left: float = 1.0
    ended_at: float = math.inf

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.asked_at

    @property
    def tpot_s(self) -> float:
        return (self.ended_at - self.first_at) / (self.num_tokens - 1)


@frozen
class FleetOutcome:
    """A run.  num_asked: of all requests; num_refused: of those that found the queue full.
    from_s: the moment from which on the run counts; tokens_per_s: from then on."""

    ended: Sequence[SimulatedText]
    num_asked: int
    num_refused: int
    from_s: float
    tokens_per_s: float


@dataclass(slots=True, eq=False)
class _Target:
    """since_s: the moment up to which texts are known, which lies ahead while prompts are read.
    reads_at_s, joins_until_s: when the last steps with prompts began, and until when another prompt
    joins them; num_rows: of these prompts.
    """

    running: list[SimulatedText] = field(default_factory=list)
    since_s: float = 0.0
    reads_at_s: float = 0.0
    joins_until_s: float = -1.0
    num_rows: int = 0


class Fleet:
    """One run of a load over targets; a request goes to the target with most free seats."""

    def __init__(self, scene: Scene, times: DecodeTimes) -> None:
        self._settings, self._texts, self._times = scene.settings, scene.texts, times
        self._step_s, self._max_rows = functools.cache(scene.machine.step_s), scene.machine.max_rows
        self._generator = np.random.default_rng(scene.settings.seed)
        num_targets = scene.settings.target.replicas
        self._targets = [_Target() for _ in range(num_targets)]
        # By number of texts there, the targets, the one that has been so longest first.
        self._by_count: list[dict[int, None]] = [{} for _ in range(scene.seats + 1)]
        self._by_count[0] = dict.fromkeys(range(num_targets))
        # By target, when the next of its texts ends.
        self._due_s = np.full(num_targets, math.inf)
        self._queue: deque[tuple[int, float]] = deque()  # number of the text, when it was asked for
        self._numbers = self._endless()
        limits = scene.config.coordinator
        self._max_queued = limits.max_queued_requests
        self._num_free = min(limits.max_running_sequences, scene.seats * num_targets)
        self._num_asked = self._num_refused = 0
        self._ended: list[SimulatedText] = []
        self._changed: dict[int, None] = {}  # targets whose next event has to be noted

    def run(self) -> FleetOutcome:
        """Run for the settings' virtual seconds; the first quarter fills the fleet, uncounted."""
        load, seconds = self._settings.load, self._settings.seconds
        from_s = seconds / 4.0
        for _ in range(load.streams):
            self._ask(0.0)
        self._open_texts(0.0)
        rate = load.requests_per_s
        arrives_at = self._generator.exponential(1.0 / rate) if rate else math.inf
        before, is_counting = 0.0, False
        while True:
            now = min(float(self._due_s.min()), arrives_at)
            if not is_counting and now >= from_s:
                before, is_counting = self._emitted(from_s), True
            if now >= seconds:
                break
            if now == arrives_at:
                self._ask(now)
                arrives_at = now + self._generator.exponential(1.0 / rate)
            else:
                num_ended = self._end_texts(now)
                for _ in range(num_ended if load.streams else 0):
                    self._ask(now)
            self._open_texts(now)
        tokens_per_s = (self._emitted(seconds) - before) / (seconds - from_s)
        return FleetOutcome(self._ended, self._num_asked, self._num_refused, from_s, tokens_per_s)

    def _ask(self, now: float) -> None:
        """Take a request; the texts are asked for in turn, each time in another order."""
        number = next(self._numbers)
        self._num_asked += 1
        if len(self._queue) - self._num_free >= self._max_queued:
            self._num_refused += 1
        else:
            self._queue.append((number, now))

    def _open_texts(self, now: float) -> None:
        """Open what waits where there is room, and note the next events of all changed targets."""
        while self._queue and self._num_free:
            place = next(iter(next(filter(None, self._by_count))))
            target = self._targets[place]
            if place not in self._changed:
                self._advance(target, now)
            self._open(target, *self._queue.popleft(), now)
            self._change(place, 1)
        for place in self._changed:
            self._note(place)
        self._changed.clear()

    def _open(self, target: _Target, number: int, asked_at: float, now: float) -> None:
        """Let a target read a prompt, and everybody there wait for its rows."""
        text, size, step_s = self._texts[number], len(target.running), self._step_s
        others_s = step_s(size, size) if size else 0.0
        if now > target.joins_until_s:
            target.reads_at_s, target.num_rows = max(target.since_s, now), 0
        target.num_rows += text.prompt_len
        room = max(self._max_rows - size, 1)
        full, rest = divmod(target.num_rows, room)
        steps_s = [step_s(size + rows, size + 1) for rows in [room] * full + [rest] * (rest > 0)]
        first_at = target.reads_at_s + others_s / 2.0 + sum(steps_s)  # behind the rest of a step
        target.joins_until_s = first_at - steps_s[-1]
        # In each of these steps the others go on: they lose what the steps take longer.
        lost_s = sum(max(each - others_s, 0.0) for each in steps_s)
        target.since_s = max(target.since_s, target.reads_at_s + lost_s)
        lag_s = first_at - target.since_s
        num_tokens = len(text.token_ids)
        target.running.append(SimulatedText(number, num_tokens, asked_at, first_at, lag_s))

    def _end_texts(self, now: float) -> int:
        """Go on with the target whose event is due; returns how many texts have ended."""
        place = int(self._due_s.argmin())
        target = self._targets[place]
        self._advance(target, now)
        over = [own for own in target.running if own.left <= _DONE]
        target.running = [own for own in target.running if own.left > _DONE]
        for own in over:
            own.ended_at = now
        self._ended += over
        self._change(place, -len(over))
        return len(over)

    def _change(self, place: int, by: int) -> None:
        """Note that a target has so many texts more."""
        self._num_free -= by
        self._changed[place] = None
        count = len(self._targets[place].running)
        del self._by_count[count - by][place]
        self._by_count[count][place] = None

    def _advance(self, target: _Target, now: float) -> None:
        """Decode up to `now`."""
        if now <= target.since_s:
            return
        for own, whole_s in self._whole_s(target):
            own.left -= (now - target.since_s) / whole_s
        target.since_s = now

    def _whole_s(self, target: _Target) -> list[tuple[SimulatedText, float]]:
        """Return each text there, and how long its whole decoding takes at present."""
        running = target.running
        times_s = self._times.of(len(running)) if running else ()
        return [(own, float(times_s[own.number])) for own in running]

    def _note(self, place: int) -> None:
        """Note when the next text of a target that has changed ends."""
        target = self._targets[place]
        rest_s = []
        for own, whole_s in self._whole_s(target):
            own.left, own.lag_s = own.left + own.lag_s / whole_s, 0.0
            rest_s.append(own.left * whole_s)
        self._due_s[place] = target.since_s + max(min(rest_s, default=math.inf), 0.0)

    def _emitted(self, now: float) -> float:
        """Return the tokens emitted up to `now`."""
        found = float(sum(each.num_tokens for each in self._ended))
        for target in self._targets:
            self._advance(target, now)
            for own in target.running:
                found += own.num_tokens * (1.0 - min(max(own.left, 0.0), 1.0))
        return found

    def _endless(self) -> Iterator[int]:
        while True:
            yield from self._generator.permutation(len(self._texts)).tolist()


# What a fleet does under a load, by the ratio of its drafters to its targets.

_PERCENTILES = (50, 90, 99)
_HEAD = (
    f"{'per target':>10} {'drafters':>8} {'tokens/s':>10} {'TTFT p50, p90, p99, ms':>24} "
    f"{'TPOT p50, p90, p99, ms':>24} {'refused':>8} {'per M tokens':>12}"
)


@frozen
class Row:
    """One ratio.  price_per_hour: of all devices."""

    ratio: float
    num_drafters: int
    price_per_hour: float
    outcome: FleetOutcome

    @property
    def cost(self) -> float:
        """The price of a million output tokens; inf where there were none."""
        speed = self.outcome.tokens_per_s
        return self.price_per_hour / 3600.0 / speed * 1e6 if speed else math.inf

    def percentiles_ms(self, name: str) -> list[float]:
        """Return those of `ttft_s` or `tpot_s` of the texts that ended while it was counted."""
        times = [
            getattr(each, name)
            for each in self.outcome.ended
            if each.ended_at >= self.outcome.from_s
        ]
        return [float(1e3 * value) for value in np.percentile(times or [np.nan], _PERCENTILES)]

    def __str__(self) -> str:
        latencies = " ".join(
            f"{', '.join(f'{value:.1f}' for value in self.percentiles_ms(name)):>24}"
            for name in ("ttft_s", "tpot_s")
        )
        refused = self.outcome.num_refused / max(self.outcome.num_asked, 1)
        return (
            f"{self.ratio:>10g} {self.num_drafters:>8,} {self.outcome.tokens_per_s:>10,.0f} "
            f"{latencies} {refused:>8.1%} {self.cost:>12.3f}"
        )


def rows(scene: Scene) -> Iterator[Row]:
    """Simulate one ratio after the other."""
    settings, target = scene.settings, scene.settings.target
    num_devices = target.replicas * scene.config.target.engine.tensor_parallel
    for ratio in settings.ratios:
        outcome = Fleet(scene, DecodeTimes(scene, scene.pool(ratio))).run()
        num_drafters = round(ratio * target.replicas)
        price = num_devices * target.price_per_hour + num_drafters * settings.drafter.price_per_hour
        yield Row(ratio, num_drafters, price, outcome)


def head(scene: Scene) -> str:
    """Return the lines above the table: what is simulated, and what of the file is not."""
    settings, pool, load = scene.settings, scene.pool(1.0), scene.settings.load
    asked = f"{load.streams:,} streams" if load.streams else f"{load.requests_per_s:,g} requests/s"
    lines = [
        f"{settings.target.replicas:,} targets under {asked} for {settings.seconds:g} s, "
        f"{len(scene.texts)} recorded texts ({settings.law})",
        f"residents: {', '.join(each.name for each in pool.residents) or 'none'}; "
        f"pool: {', '.join(sorted(pool.remote)) or 'none'}",
    ]
    if scene.unrecorded:
        lines.append(f"not in the recording, so left out: {', '.join(scene.unrecorded)}")
    return "\n".join([*lines, "", _HEAD])


def verdict(found: Sequence[Row]) -> str:
    """Return the line below the table."""
    best = min(found, key=lambda row: row.cost)
    return f"cheapest: {best.ratio:g} drafters per target, {best.cost:.3f} per million tokens"
