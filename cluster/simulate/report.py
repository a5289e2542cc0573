"""What a fleet does under a load, by the ratio of its drafters to its targets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from cluster.records import frozen
from cluster.simulate.decode_times import DecodeTimes
from cluster.simulate.fleet import Fleet, FleetLimits, FleetOutcome
from cluster.simulate.settings import Scene

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
    settings, config = scene.settings, scene.config
    limits, engine = config.coordinator, config.target.engine
    places = FleetLimits(
        settings.target.replicas,
        engine.max_running_sequences,
        limits.max_running_sequences,
        limits.max_queued_requests,
    )
    for ratio in settings.ratios:
        times = DecodeTimes(
            scene.texts, scene.machine, scene.pool(ratio), limits, places.seats, settings.seed
        )
        fleet = Fleet(scene.texts, times, scene.machine, places, settings.seed)
        outcome = fleet.run(settings.load, settings.seconds, settings.seconds / 4.0)
        num_drafters = round(ratio * settings.target.replicas)
        price = (
            settings.target.replicas * engine.tensor_parallel * settings.target.price_per_hour
            + num_drafters * settings.drafter.price_per_hour
        )
        yield Row(ratio, num_drafters, price, outcome)


def head(scene: Scene) -> str:
    """Return the lines above the table: what is simulated, and what of the file is not."""
    settings, pool = scene.settings, scene.pool(1.0)
    load = settings.load
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
