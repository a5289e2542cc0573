"""Reads figures by vLLM's names from a page for Prometheus, of vLLM, of ours, or of both alike."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from cluster.records import frozen

Labels = frozenset[tuple[str, str]]

_DRAFTED = "vllm:spec_decode_num_"
_COUNTED = ("drafts", "draft_tokens", "accepted_tokens")


@frozen
class Page:
    """Every sample of a page, by its name and its labels.

    at_s: when it was read; of what was counted between two pages, how long that took."""

    samples: Mapping[str, Mapping[Labels, float]]
    at_s: float = 0.0

    @classmethod
    def read(cls, text: str, at_s: float = 0.0) -> Page:
        """Raises ValueError if `text` is no such page."""
        samples = defaultdict[str, dict[Labels, float]](dict)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name][frozenset(sample.labels.items())] = sample.value
        return cls(samples, at_s)

    def since(self, before: Page) -> Page:
        """What was counted after an earlier page of the same server; gauges say nothing there."""
        growth = {
            name: {
                labels: value - before.samples.get(name, {}).get(labels, 0.0)
                for labels, value in series.items()
            }
            for name, series in self.samples.items()
        }
        return Page(growth, self.at_s - before.at_s)

    def values(self, name: str) -> list[float]:
        """Of all labels."""
        return [*self.samples.get(name, {}).values()]

    def total(self, name: str) -> float | None:
        """Sum over all labels; None if the page has no such sample."""
        found = self.values(name)
        return sum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of one label."""
        sums = defaultdict[str, float](float)
        for labels, value in self.samples.get(name, {}).items():
            named = dict(labels)
            if label in named:
                sums[named[label]] += value
        return sums

    def quantile(self, name: str, share: float) -> float | None:
        """The value below which `share` of the observations of a histogram lie.

        As Prometheus' histogram_quantile: evenly spread within a bucket.  None without any.
        """
        buckets = self.by(f"{name}_bucket", "le")
        counts = sorted((float(le), count) for le, count in buckets.items())
        wanted = share * counts[-1][1] if counts else 0.0
        if wanted <= 0.0:
            return None
        low, below = 0.0, 0.0
        for edge, count in counts:
            if count >= wanted:
                if edge == float("inf"):
                    return low
                return low + (edge - low) * (wanted - below) / (count - below)
            low, below = edge, count
        return low


@frozen
class SpeculationCounts:
    """What was drafted and accepted meanwhile, in vLLM's terms.

    mean_acceptance_length: tokens per step with drafts, the bonus token included."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[float, ...]
    acceptance_rate: float
    mean_acceptance_length: float


def speculation(counted: Sequence[Page]) -> SpeculationCounts | None:
    """Of what was counted several times together (`Page.since`); None if the pages have no such
    figures, or nothing was drafted."""
    drafts, drafted, accepted = (
        sum(int(each.total(f"{_DRAFTED}{name}_total") or 0) for each in counted)
        for name in _COUNTED
    )
    if not drafted:
        return None
    positions = Counter[int]()
    for each in counted:
        found = each.by(f"{_DRAFTED}accepted_tokens_per_pos_total", "position")
        positions.update({int(position): int(count) for position, count in found.items()})
    steps = max(drafts, 1)
    rates = tuple(positions[place] / steps for place in sorted(positions))
    return SpeculationCounts(
        drafts, drafted, accepted, rates, accepted / drafted, 1.0 + accepted / steps
    )
