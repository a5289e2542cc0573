"""Builds /metrics: the series of every process that records metrics, side by side.

Any ingress replica may answer a scrape.  So each sample has the name of its process as a label and
nothing is added up: a counter belongs to one process and never falls while that process lives.  A
process that does not answer in time is missing from that scrape, which counts the missing ones.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from cluster import metrics
from cluster.errors import DrafthouseError
from cluster.metrics.recorder import Recorder

log = logging.getLogger(__name__)

# Half of Prometheus' default time limit for a scrape.
_TIMEOUT_S = 5.0


class AsksCoordinator(Protocol):
    """The part of a coordinator link that is used here."""

    async def metrics(self, timeout_s: float) -> bytes: ...


# Within another label's value the quote would be escaped.
_KEY = re.compile(r'[{,]key="([^"]*)"')

# Returns the texts of the other ingress replicas that answer in time.
AskOthers = Callable[[float], Awaitable[list[bytes]]]


async def nobody(timeout_s: float) -> list[bytes]:
    """The `AskOthers` of an ingress with only one replica."""
    return []


async def metrics_page(
    own: Recorder,
    coordinators: Mapping[str, AsksCoordinator],
    others: AskOthers,
    num_others: int,
) -> bytes:
    """The whole page.  own: this replica's recorder.  num_others: expected other replicas."""
    answers, found = await asyncio.gather(
        asyncio.gather(*(_ask(name, link) for name, link in coordinators.items())),
        others(_TIMEOUT_S),
    )
    texts = [text for text in answers if text is not None]
    scrape = Recorder(only=(metrics.MISSING_PROCESSES,))
    missing = {"coordinator": len(answers) - len(texts), "ingress": num_others - len(found)}
    for role, count in missing.items():
        scrape.set(metrics.MISSING_PROCESSES, max(count, 0), role=role)
    return side_by_side([scrape.render(), own.render(), *found, *texts])


async def _ask(name: str, link: AsksCoordinator) -> bytes | None:
    try:
        return await link.metrics(_TIMEOUT_S)
    except DrafthouseError as error:
        log.info("coordinator id=%s did not send its metrics: %s", name, error)
        return None


def seen_by(owner: str, page: bytes, *, is_general: bool) -> bytes:
    """Return what the owner of that key sees of a page: of the series by key its own, and those of
    no key if `is_general`."""
    lines = []
    for line in page.decode().splitlines(keepends=True):
        key = _KEY.search(line)
        if line.startswith("#") or (key[1] == owner if key else is_general):
            lines.append(line)
    return "".join(lines).encode()


def side_by_side(texts: Iterable[bytes]) -> bytes:
    """Merge several texts in Prometheus' format into one that describes each family once."""
    comments: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        family = ""
        for line in text.decode().splitlines():
            if not line.startswith("# "):
                samples[family].append(line)
                continue
            _, kind, family, _ = line.split(" ", 3)
            samples.setdefault(family, [])
            known = comments.setdefault(family, [])
            if not any(comment.startswith(f"# {kind} ") for comment in known):
                known.append(line)
    lines = [
        line for family, described in comments.items() for line in (*described, *samples[family])
    ]
    return ("\n".join(lines) + "\n").encode()
