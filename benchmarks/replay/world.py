"""The replay's models of machines and drafters: cost curves, and the growth of trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.replay.texts import RecordedText
from cluster.core import EMPTY_FLOATS, EMPTY_TREE, FloatArray, TokenTree
from cluster.spec.budget import Ask
from cluster.spec.merge_trees import merge
from cluster.spec.step_profile import DraftTime, StepProfile
from cluster.spec.tree import prune, reroot

# The most nodes of a recorded tree.
_MAX_NODES = 32

Offer = tuple[TokenTree, FloatArray]
NOTHING: Offer = (EMPTY_TREE, EMPTY_FLOATS)


@dataclass(frozen=True, slots=True)
class Machine:
    """A target's cost curves, all in seconds.

    rows, times_s: the rows and times of steps.  told_s: the times by its profile, None = the same.
    look_up_s: the time of look-ups per round and per node; model_s: the time that a model adds.
    round_s, sequence_s: the time outside the step per round, and per sequence of it.
    """

    name: str
    rows: tuple[int, ...]
    times_s: tuple[float, ...]
    look_up_s: tuple[float, float]
    model_s: tuple[float, float]
    told_s: tuple[float, ...] | None = None
    round_s: float = 0.0008
    sequence_s: float = 0.00001

    @property
    def profile(self) -> StepProfile:
        """Return the profile that the target has measured before it served."""
        return _profile(self.rows, self.told_s or self.times_s)

    def step_s(self, num_rows: int, num_sequences: int) -> float:
        """Return the time of a round without drafting."""
        outside_s = self.round_s + self.sequence_s * num_sequences
        return float(_profile(self.rows, self.times_s).at([num_rows])[0]) + outside_s

    def draft_times(self, *, has_models: bool) -> list[DraftTime]:
        """Return the times of its residents, as measured before it served."""
        return [
            DraftTime(
                count, nodes, with_models,
                self.draft_s(count, Ask(nodes, with_models), has_models=has_models),
            )
            for with_models in ((False, True) if has_models else (False,))
            for count in (1, 4, 16)
            for nodes in (2, 8, 24)
        ]  # fmt: skip

    def draft_s(self, num_sequences: int, ask: Ask, *, has_models: bool) -> float:
        """Return the residents' time.  has_models: not all of them are look-ups."""
        if ask.num_nodes == 0:
            return 0.0
        kinds = (
            (self.look_up_s, self.model_s) if ask.with_models and has_models else (self.look_up_s,)
        )
        return sum(once_s + node_s * ask.num_nodes * num_sequences for once_s, node_s in kinds)


def _profile(rows: tuple[int, ...], times_s: tuple[float, ...]) -> StepProfile:
    found = StepProfile.of(rows, times_s)
    assert found is not None
    return found


# SmolLM2-135M-Instruct on two cores, with the rows and times that its engine has profiled.  The
# model among its residents is its distilled LM.
CPU = Machine(
    "cpu",
    (1, 2, 4, 8, 12, 16, 32, 64, 128, 256),
    (0.0066, 0.0066, 0.0067, 0.0068, 0.0069, 0.0082, 0.0126, 0.0214, 0.039, 0.0742),
    look_up_s=(0.0001, 0.0000005), model_s=(0.0034, 0.000055),
)  # fmt: skip
# The same with profiles of a wrong shape: one has no knee, the other one too early.
FLAT = replace(CPU, name="cpu-flat", told_s=tuple(0.0066 + 0.00001 * rows for rows in CPU.rows))
STEEP = replace(CPU, name="cpu-steep", told_s=tuple(0.0066 + 0.00060 * rows for rows in CPU.rows))
# The same model on two cores of a Xeon that multiplies matrices with AMX.
AMX = Machine(
    "amx", (1, 4, 16, 64), (0.0130, 0.0142, 0.0187, 0.0330),
    look_up_s=(0.0001, 0.0000005), model_s=(0.0060, 0.000055),
)  # fmt: skip
# Reading the weights takes 10 ms, and computing catches up with that at 256 rows; a small model
# as resident, whose passes are as memory-bound.
GPU = Machine(
    "gpu",
    (1, 64, 128, 256, 512, 1024, 2048),
    (0.0100, 0.0101, 0.0103, 0.0108, 0.0200, 0.0390, 0.0770),
    look_up_s=(0.0001, 0.0), model_s=(0.0010, 0.000002),
)  # fmt: skip


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


def merged(names: tuple[str, ...]) -> Source:
    """Some recorded drafters with their trees merged, as the best fixed budget uses them."""
    known: dict[tuple[int, int], Offer] = {}

    def tree_at(text: RecordedText, position: int) -> Offer:
        key = (id(text), position)
        if key not in known:
            offers = [text.trees[name].at(position) for name in names]
            offers = [offer for offer in offers if len(offer[0])]
            union = merge([tree for tree, _ in offers], [claimed for _, claimed in offers])
            known[key] = union.tree, union.survival
        return known[key]

    return Source(tree_at)


def random_source() -> Source:
    """A drafter that is sure of itself and never right: a trunk with a twig at each node."""
    size = 32
    parents = [-1 if node < 2 else node - 2 if node % 2 == 0 else node - 3 for node in range(size)]
    tree = TokenTree.of([-2 - node for node in range(size)], parents)
    depth = [node // 2 + 1 for node in range(size)]
    shares = [0.85**d if node % 2 == 0 else 0.1 * 0.85 ** (d - 1) for node, d in enumerate(depth)]
    claimed = np.array(shares, dtype=np.float32)
    return Source(lambda text, position: (tree, claimed))


def silent_source() -> Source:
    """A drafter that never says anything."""
    return Source(lambda text, position: NOTHING)


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Drafters and the place where they run.

    models: names of those that are no look-ups.
    nodes_per_s: speed for one text on a device of their own; None = residents.  crowd: from so many
    texts on, the texts share that speed.  latency_s: from a commit to the first nodes after it.
    """

    name: str
    sources: Mapping[str, Source]
    models: frozenset[str] = frozenset()
    nodes_per_s: float | None = None
    crowd: int = 8
    latency_s: float = 0.002


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
        if count == 0:
            return NOTHING
        if count not in self.known:
            self.known[count] = self.source.best(text, self.position, count)
        return self.known[count]

    def is_complete(self, text: RecordedText, now: float) -> bool:
        """True if it has nothing to add."""
        has_begun = now >= self.since_s + self.latency_s
        return has_begun and self.num_nodes(now) >= len(self.source.tree_at(text, self.position)[0])

    def commit(self, text: RecordedText, position: int, now: float) -> None:
        """Move on to `position` of the text; nodes below the committed path are kept."""
        tree, _ = self.at(text, now)
        followed = text.token_ids[self.position : position]
        rest = reroot(tree, followed)
        self.kept = len(rest.tree) if rest.hit else 0
        self.position, self.since_s = position, now
        self.known.clear()
