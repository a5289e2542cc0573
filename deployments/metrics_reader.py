"""Reads figures by vLLM's names from a page for Prometheus, of vLLM, of ours, or of both alike."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cluster.records import frozen

_DRAFTED = "vllm:spec_decode_num_"
_COUNTED = ("drafts", "draft_tokens", "accepted_tokens")


@frozen
class Page:
    """Every sample of a page, by its name; at_s: when it was read."""

    samples: Mapping[str, Sequence[Sample]]
    at_s: float = 0.0

    @classmethod
    def read(cls, text: str, at_s: float = 0.0) -> Page:
        """Raises ValueError if `text` is no such page."""
        samples = defaultdict[str, list[Sample]](list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name].append(sample)
        return cls(samples, at_s)

    def values(self, name: str) -> list[float]:
        """Of all labels."""
        return [sample.value for sample in self.samples.get(name, ())]

    def total(self, name: str) -> float | None:
        """Sum over all labels; None if the page has no such sample."""
        found = self.values(name)
        return sum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of one label."""
        sums = defaultdict[str, float](float)
        for sample in self.samples.get(name, ()):
            if label in sample.labels:
                sums[sample.labels[label]] += sample.value
        return sums


@frozen
class MetricsChange:
    """What was counted between two pages of one server: since its start if `before` is empty."""

    before: Page
    after: Page

    @property
    def seconds(self) -> float:
        return self.after.at_s - self.before.at_s

    def count(self, name: str) -> float | None:
        """Growth of a counter, over all labels; `name` as vLLM documents it, without `_total`."""
        after = self.after.total(f"{name}_total")
        return None if after is None else after - (self.before.total(f"{name}_total") or 0.0)

    def count_by(self, name: str, label: str) -> dict[str, float]:
        """Growth of a counter by the values of one label."""
        return self._growth(f"{name}_total", label)

    def quantile(self, name: str, share: float) -> float | None:
        """The value below which `share` of the new observations of a histogram lie.

        As Prometheus' histogram_quantile: evenly spread within a bucket.  None without any.
        """
        growth = self._growth(f"{name}_bucket", "le")
        counts = sorted((float(le), count) for le, count in growth.items())
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

    def _growth(self, sample: str, label: str) -> dict[str, float]:
        before, after = self.before.by(sample, label), self.after.by(sample, label)
        return {key: value - before.get(key, 0.0) for key, value in after.items()}


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


def speculation(changes: Sequence[MetricsChange]) -> SpeculationCounts | None:
    """Of all changes together; None if the pages have no such figures, or nothing was drafted."""
    drafts, drafted, accepted = (
        sum(int(change.count(_DRAFTED + name) or 0) for change in changes) for name in _COUNTED
    )
    if not drafted:
        return None
    positions = Counter[int]()
    for change in changes:
        found = change.count_by(f"{_DRAFTED}accepted_tokens_per_pos", "position")
        positions.update({int(position): int(count) for position, count in found.items()})
    steps = max(drafts, 1)
    rates = tuple(positions[each] / steps for each in sorted(positions))
    return SpeculationCounts(
        drafts, drafted, accepted, rates, accepted / drafted, 1.0 + accepted / steps
    )
