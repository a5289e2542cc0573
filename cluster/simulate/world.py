"""Recorded texts, and models of machines and drafters: cost curves, and the growth of trees."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.core import EMPTY_FLOATS, EMPTY_TREE, FloatArray, TokenArray, TokenTree
from cluster.plan.texts import Resident
from cluster.records import frozen, record
from cluster.spec.step_profile import DraftTime, StepProfile
from cluster.spec.tree import join, prune, reroot

# Recorded texts: what a target wrote, and the tree that each drafter had at every place of it.
#
# The text does not depend on the drafts, so one recording serves for every change of the loop
# that decides about them. A file is one compressed npz archive without pickled objects.


# A file with another version has another form.
FORMAT = 1
# Of `RecordedTrees`, beside the survivals.
COLUMNS = ("offsets", "token_ids", "parents")


@record
class RecordedTrees:
    """One drafter's trees along one text.

    offsets: int64[positions + 1], where the nodes of each position's tree begin.
    token_ids, parents: int32[nodes], parents within their own tree.  survival: float32[nodes].
    """

    offsets: npt.NDArray[np.int64]
    token_ids: TokenArray
    parents: TokenArray
    survival: FloatArray

    def at(self, position: int) -> tuple[TokenTree, FloatArray]:
        """Return the tree after the prompt and `position` output tokens, and its claims."""
        nodes = slice(int(self.offsets[position]), int(self.offsets[position + 1]))
        tree = TokenTree(self.token_ids[nodes], self.parents[nodes])
        return tree, self.survival[nodes]

    @classmethod
    def of(cls, trees: Sequence[tuple[TokenTree, FloatArray]]) -> RecordedTrees:
        """The trees of positions 0, 1, 2 ..."""
        forest = join([tree for tree, _ in trees])
        parents = np.concatenate([tree.parents for tree, _ in trees])
        survival = np.concatenate([survival for _, survival in trees])
        return cls(forest.starts, forest.token_ids, parents, survival)


@record
class RecordedText:
    """One output of the target.

    token_ids: int32[n], the output.  trees: by drafter, for positions 0 to n - 1.
    """

    prompt_len: int
    token_ids: TokenArray
    task: str
    is_sampled: bool
    trees: Mapping[str, RecordedTrees]


def load(path: Path) -> list[RecordedText]:
    """The texts of a file; ValueError for one of another form."""
    with np.load(path, allow_pickle=False) as arrays:
        header = json.loads(arrays["header"].tobytes())
        if header.get("format") != FORMAT:
            raise ValueError(f"{path}: format {header.get('format')}; record it anew")
        texts = []
        for index, (prompt_len, task, is_sampled) in enumerate(header["texts"]):
            trees = {
                name: RecordedTrees(
                    **{column: arrays[f"{index}.{number}.{column}"] for column in COLUMNS},
                    survival=arrays[f"{index}.{number}.survival"].astype(np.float32),
                )
                for number, name in enumerate(header["drafters"])
            }
            texts.append(RecordedText(prompt_len, arrays[f"{index}.text"], task, is_sampled, trees))
    return texts


# The most nodes of a recorded tree.
_MAX_NODES = 32
# Tokens of the prompt by which a target measures how long its models read.
_READ_LEN = 128

Offer = tuple[TokenTree, FloatArray]
NOTHING: Offer = (EMPTY_TREE, EMPTY_FLOATS)


@frozen
class Machine:
    """A target's cost curves, all in seconds.

    steps: the times of forwards.  told: those by its own profile, None = the same.
    look_up_s: the time of look-ups per round and per node, of all of them together; model_s: that
    of each model; read_s: in which a model reads a token that it was not told of.
    round_s, sequence_s: the time outside the step per round, and per sequence of it.  max_rows: the
    most rows of a step.
    """

    steps: StepProfile
    look_up_s: tuple[float, float]
    model_s: tuple[float, float]
    told: StepProfile | None = None
    read_s: float = 0.0
    round_s: float = 0.0008
    sequence_s: float = 0.00001
    max_rows: int = 512

    def step_s(self, num_rows: int, num_sequences: int) -> float:
        """Return the time of a round without drafting."""
        outside_s = self.round_s + self.sequence_s * num_sequences
        return float(self.steps.at([num_rows])[0]) + outside_s

    def draft_times(self, residents: Sequence[Resident]) -> list[DraftTime]:
        """Return the times of its residents, as measured before it served: of drafting, and of
        reading a prompt by each model."""
        read_s = self.read_s * _READ_LEN
        reading = [
            DraftTime(1, 8, each.name, False, self.draft_s(1, 8, each, residents) + read_s, 1)
            for each in residents
            if read_s and not each.is_look_up
        ]
        return reading + [
            DraftTime(
                count,
                nodes,
                each.name,
                each.is_look_up,
                self.draft_s(count, nodes, each, residents),
            )
            for each in residents
            for count in (1, 4, 16)
            for nodes in (2, 8, 24)
        ]

    def draft_s(
        self, num_sequences: int, num_nodes: int, own: Resident, residents: Sequence[Resident]
    ) -> float:
        """Return the time of one resident's turn; look-ups share the time of all of them."""
        once_s, node_s = self.look_up_s if own.is_look_up else self.model_s
        num_sharing = sum(each.is_look_up for each in residents) if own.is_look_up else 1
        return (once_s + node_s * num_nodes * num_sequences) / num_sharing


# The complete tree of one drafter at a place of a text.
DraftSource = Callable[[RecordedText, int], Offer]


def best(tree: Offer, num_nodes: int) -> Offer:
    """The best nodes of a tree."""
    return prune(*tree, num_nodes)[:2]


def recorded(name: str) -> DraftSource:
    """A drafter as it was recorded."""
    return lambda text, position: text.trees[name].at(position)


@record
class Pool:
    """Drafters and the places where they run.

    models: names of those that are no look-ups.  remote: names of those on devices of their own;
    the others are residents.
    nodes_per_s: a device's speed for one text.  crowd: from so many texts on, the texts share that
    speed.  latency_s: from a commit to the first nodes after it.
    """

    sources: Mapping[str, DraftSource]
    models: frozenset[str] = frozenset()
    remote: frozenset[str] = frozenset()
    nodes_per_s: float = 0.0
    crowd: float = 8.0
    latency_s: float = 0.002

    @property
    def residents(self) -> tuple[Resident, ...]:
        names = [name for name in self.sources if name not in self.remote]
        return tuple(Resident(name, name not in self.models) for name in names)


@dataclass(slots=True, eq=False)
class RemoteTree:
    """The tree of one drafter on a device of its own, for one text.

    kept: nodes that it had at since_s, when its root was committed.
    """

    source: DraftSource
    rate: float
    latency_s: float
    position: int = 0
    kept: int = 0
    since_s: float = 0.0

    def num_nodes(self, now: float) -> int:
        grown = int((now - self.since_s - self.latency_s) * self.rate)
        return min(self.kept + max(grown, 0), _MAX_NODES)

    def at(self, text: RecordedText, now: float) -> Offer:
        """Return the nodes that it has grown so far."""
        return best(self.source(text, self.position), self.num_nodes(now))

    def commit(self, text: RecordedText, position: int, now: float) -> None:
        """Move on to `position` of the text; nodes below the committed path are kept."""
        tree, _ = self.at(text, now)
        followed = text.token_ids[self.position : position]
        self.kept = len(reroot(tree, followed).tree)
        self.position, self.since_s = position, now
