"""The control loop over texts whose kinds it is not told, and one that knows whom to ask."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.replay.synthetic import kind_at
from cluster.core import TokenTree
from cluster.simulate.replay import Adaptive, Playing


class Watched(Adaptive):
    """The target's own controller; the kinds of the texts are hidden from it."""

    def plan(self, batch: Sequence[Playing], now: float, prompt_rows: int) -> Sequence[TokenTree]:
        for own in batch:
            own.text.group = "default", own.recorded.is_sampled
        return super().plan(batch, now, prompt_rows)


class Oracle(Watched):
    """The same; each text may ask the specialist alone whose kind it is of at present."""

    def plan(self, batch: Sequence[Playing], now: float, prompt_rows: int) -> Sequence[TokenTree]:
        for own in batch:
            own.text.names = (kind_at(own.recorded, own.position),)
        return super().plan(batch, now, prompt_rows)

    def first_ask(self, own: Playing, now: float) -> None:
        own.text.names = (kind_at(own.recorded, own.position),)
        super().first_ask(own, now)
