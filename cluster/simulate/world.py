"""Models of machines and drafters: cost curves, and the growth of trees."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.core import EMPTY_FLOATS, EMPTY_TREE, FloatArray, TokenTree
from cluster.plan.resident import Resident
from cluster.records import frozen, record
from cluster.simulate.texts import RecordedText
from cluster.spec.step_profile import DraftTime, StepProfile
from cluster.spec.tree import prune, reroot

# The most nodes of a recorded tree.
_MAX_NODES = 32
# Tokens of the prompt by which a target measures how long its models read.
_READ_LEN = 128

Offer = tuple[TokenTree, FloatArray]
NOTHING: Offer = (EMPTY_TREE, EMPTY_FLOATS)


@frozen
class Machine:
    """A target's cost curves, all in seconds.

    rows, times_s: the rows and times of steps.  told_s: the times by its profile, None = the same.
    look_up_s: the time of look-ups per round and per node, of all of them together; model_s: that
    of each model; read_s: in which a model reads a token that it was not told of.
    round_s, sequence_s: the time outside the step per round, and per sequence of it.  max_rows: the
    most rows of a step.
    """

    rows: tuple[int, ...]
    times_s: tuple[float, ...]
    look_up_s: tuple[float, float]
    model_s: tuple[float, float]
    told_s: tuple[float, ...] | None = None
    read_s: float = 0.0
    round_s: float = 0.0008
    sequence_s: float = 0.00001
    max_rows: int = 512

    @property
    def profile(self) -> StepProfile:
        """Return the profile that the target has measured before it served."""
        return _profile(self.rows, self.told_s or self.times_s)

    def step_s(self, num_rows: int, num_sequences: int) -> float:
        """Return the time of a round without drafting."""
        outside_s = self.round_s + self.sequence_s * num_sequences
        return float(_profile(self.rows, self.times_s).at([num_rows])[0]) + outside_s

    def draft_times(self, residents: Sequence[Resident]) -> list[DraftTime]:
        """Return the times of its residents, as measured before it served: of drafting, and of
        reading a prompt by each model."""
        num_look_ups = sum(each.is_look_up for each in residents)
        reading = [
            DraftTime(1, 8, each.name, False, self.draft_s(1, 8, 0) + self.read_s * _READ_LEN, 1)
            for each in residents
            if self.read_s and not each.is_look_up
        ]
        return reading + [
            DraftTime(
                count,
                nodes,
                each.name,
                each.is_look_up,
                self.draft_s(count, nodes, num_look_ups if each.is_look_up else 0),
            )
            for each in residents
            for count in (1, 4, 16)
            for nodes in (2, 8, 24)
        ]

    def draft_s(self, num_sequences: int, num_nodes: int, num_look_ups: int) -> float:
        """Return the time of one resident's turn.  num_look_ups: there are so many, and it is one
        of them; 0 = it is a model."""
        once_s, node_s = self.look_up_s if num_look_ups else self.model_s
        return (once_s + node_s * num_nodes * num_sequences) / max(num_look_ups, 1)


@functools.cache
def _profile(rows: tuple[int, ...], times_s: tuple[float, ...]) -> StepProfile:
    found = StepProfile.of(rows, times_s)
    assert found is not None
    return found


@dataclass(slots=True, eq=False)
class Source:
    """The complete tree of one drafter at every place of a text."""

    tree_at: Callable[[RecordedText, int], Offer]

    def best(self, text: RecordedText, position: int, num_nodes: int) -> Offer:
        tree, survival = self.tree_at(text, position)
        pruned, claimed, _ = prune(tree, survival, num_nodes)
        return pruned, claimed


def recorded(name: str) -> Source:
    """A drafter as it was recorded."""
    return Source(lambda text, position: text.trees[name].at(position))


@record
class Pool:
    """Drafters and the places where they run.

    models: names of those that are no look-ups.  remote: names of those on devices of their own;
    the others are residents.
    nodes_per_s: a device's speed for one text.  crowd: from so many texts on, the texts share that
    speed.  latency_s: from a commit to the first nodes after it.
    """

    sources: Mapping[str, Source]
    models: frozenset[str] = frozenset()
    remote: frozenset[str] = frozenset()
    nodes_per_s: float = 0.0
    crowd: float = 8.0
    latency_s: float = 0.002

    @property
    def residents(self) -> tuple[Resident, ...]:
        names = [name for name in self.sources if name not in self.remote]
        return tuple(
            Resident(number, name, name not in self.models) for number, name in enumerate(names)
        )


@dataclass(slots=True, eq=False)
class Growing:
    """The tree of one drafter on a device of its own, for one text.

    kept: nodes that it had at since_s, when its root was committed.
    """

    source: Source
    rate: float
    latency_s: float
    position: int = 0
    kept: int = 0
    since_s: float = 0.0
    known: dict[int, Offer] = field(default_factory=dict)

    def num_nodes(self, now: float) -> int:
        grown = int((now - self.since_s - self.latency_s) * self.rate)
        return min(self.kept + max(grown, 0), _MAX_NODES)

    def at(self, text: RecordedText, now: float) -> Offer:
        """Return the nodes that it has grown so far."""
        count = self.num_nodes(now)
        if count not in self.known:
            self.known[count] = self.source.best(text, self.position, count)
        return self.known[count]

    def commit(self, text: RecordedText, position: int, now: float) -> None:
        """Move on to `position` of the text; nodes below the committed path are kept."""
        tree, _ = self.at(text, now)
        followed = text.token_ids[self.position : position]
        self.kept = len(reroot(tree, followed).tree)
        self.position, self.since_s = position, now
        self.known.clear()
