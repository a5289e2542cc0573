"""Merges the Prometheus texts of several processes; describes each family once."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.metrics import ALL, QUEUED, RUNNING, TARGET_UP

# Gauges that count things of one process and are added.  Other gauges describe things that several
# coordinators see (a drafter's replicas, a worker's pages); there the largest value is the newest.
_SUMMED_GAUGES = frozenset(metric.name for metric in (RUNNING, QUEUED, TARGET_UP))
_OTHER_GAUGES = frozenset(
    metric.name for metric in ALL if metric.kind == "gauge" and metric.name not in _SUMMED_GAUGES
)


def merge_texts(texts: Iterable[bytes]) -> bytes:
    """Merge the texts that `Recorder.render` returned in several processes.

    Counters and histograms are added.  Families keep the order of their first appearance.
    """
    comments: dict[str, list[str]] = {}
    samples: dict[str, dict[str, float]] = {}
    for text in texts:
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("# "):
                _, kind, family, _ = line.split(" ", 3)
                known = comments.setdefault(family, [])
                if not any(comment.startswith(f"# {kind} ") for comment in known):
                    known.append(line)
                continue
            series, _, value = line.rpartition(" ")
            values = samples.setdefault(family, {})
            if series in values and family in _OTHER_GAUGES:
                values[series] = max(values[series], float(value))
            else:
                values[series] = values.get(series, 0.0) + float(value)
    lines = []
    for family, described in comments.items():
        lines += described
        lines += [f"{series} {value!r}" for series, value in samples.get(family, {}).items()]
    return ("\n".join(lines) + "\n").encode()
