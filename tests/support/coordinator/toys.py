"""Drafters without networks: their trees are pure functions of the committed tokens.

They speak the very frames that real drafters speak, over any link; so does the target beside them,
which is the real step loop (see `toy_target`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from cluster.core import EMPTY_TREE, Commit, Observation, Proposal, TokenTree
from cluster.errors import WorkerError
from cluster.rpc.link import Link
from cluster.rpc.messages import (
    CommitFrame,
    ProposalFrame,
    TextVerdict,
    VerdictFrame,
    WorkerDescription,
)
from cluster.spec.token_log import prefix_hash
from tests.support.coordinator.toy_law import VOCAB_SIZE, plain_draws, plain_text
from tests.support.coordinator.toy_target import ToyTarget, target_description
from tests.support.spec import trees

__all__ = [
    "VOCAB_SIZE",
    "Grow",
    "ToyDrafter",
    "ToyTarget",
    "drafter_description",
    "oracle_chain",
    "oracle_in_a_crowd",
    "plain_draws",
    "plain_text",
    "random_tree",
    "target_description",
    "told_instead",
]


def drafter_description(name: str, worker_id: str = "drafter-0") -> WorkerDescription:
    return WorkerDescription(worker_id, "drafter", name, tokenizer_hash="t")


Grow = Callable[[list[int], Commit], TokenTree]


def told_instead(change: Callable[[TextVerdict], TextVerdict]) -> Callable[..., VerdictFrame]:
    """What a target says in place of a frame whose verdicts are changed so."""
    return lambda frame: replace(frame, verdicts=tuple(map(change, frame.verdicts)))


def oracle_chain(length: int = 4) -> Grow:
    """Drafts exactly what the target will draw."""

    def grow(context: list[int], opened: Commit) -> TokenTree:
        prompt, output = context[: opened.prompt_len], context[opened.prompt_len :]
        if len(prompt) < opened.prompt_len:
            return EMPTY_TREE  # it has come in parts
        draws = plain_draws(prompt, opened.params, len(output) + length)
        assert draws[: len(output)] == output, "the committed text is not the target's"
        return TokenTree.chain(draws[len(output) :])

    return grow


def random_tree(seed: int, num_nodes: int = 8) -> Grow:
    """A random tree of random tokens: right now and then, by chance."""
    generator = np.random.default_rng(seed)

    return lambda context, opened: trees.random_tree(generator, VOCAB_SIZE, num_nodes)


def oracle_in_a_crowd(seed: int) -> Grow:
    """The right chain with random siblings at every depth."""
    generator = np.random.default_rng(seed)
    chain = oracle_chain(3)

    def grow(context: list[int], opened: Commit) -> TokenTree:
        right = chain(context, opened).token_ids.tolist()
        tokens, parents, last = [], [], -1
        for token in right:
            siblings = [token, *generator.integers(0, VOCAB_SIZE, 2).tolist()]
            tokens.extend(siblings)
            parents.extend([last] * 3)
            last = len(tokens) - 3
        return trees.dedup(tokens, parents)

    return grow


@dataclass
class ToyDrafter:
    """Keeps the committed tokens and proposes `grow(context)` after every commit."""

    name: str
    grow: Grow
    survival: float = 0.5
    contexts: dict[str, list[int]] = field(default_factory=dict)
    opened: dict[str, Commit] = field(default_factory=dict)
    frames: list[CommitFrame] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    spoil: Callable[[Proposal], Proposal] = lambda proposal: proposal
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    devices: tuple[str, ...] = ()
    model_hash: str = ""
    is_held: bool = False  # what comes waits for the gate

    def __post_init__(self) -> None:
        if not self.is_held:
            self.gate.set()

    @property
    def commits(self) -> list[Commit]:
        """Those of all frames."""
        return [commit for frame in self.frames for commit in frame.commits]

    def describe(self) -> WorkerDescription:
        return drafter_description(self.name)

    async def serve(self, link: Link[ProposalFrame, CommitFrame]) -> None:
        try:
            async for frame in link:
                self.frames.append(frame)
                await self.gate.wait()
                await link.send(self.answer(frame))
        except WorkerError:
            return
        finally:
            self.contexts.clear()  # leased to the link

    def answer(self, frame: CommitFrame) -> ProposalFrame:
        for request_id in frame.released:
            self.released.append(request_id)
            self.contexts.pop(request_id, None)
        observations: list[Observation] = []
        proposals: list[Proposal] = []
        for commit in frame.commits:
            held = self.contexts.get(commit.request_id, [])
            known = held[: commit.base_len]
            if commit.base_len <= len(held) and commit.prefix_hash == prefix_hash(known):
                if commit.params is not None:
                    self.opened[commit.request_id] = commit
                held = known + commit.token_ids.tolist()
                self.contexts[commit.request_id] = held
                proposals.append(self._propose(commit, held))
            else:
                held = held if commit.base_len > len(held) else []
                self.contexts[commit.request_id] = held
            observations.append(Observation(commit.request_id, commit.generation, len(held)))
        counts = {"num_requests": len(self.contexts), "draft_time_s": 0.25}
        return ProposalFrame(tuple(proposals), tuple(observations), **counts)

    def _propose(self, commit: Commit, context: list[int]) -> Proposal:
        tree = self.grow(context, self.opened[commit.request_id])
        depth: list[int] = []
        for parent in tree.parents.tolist():
            depth.append(1 if parent < 0 else depth[parent] + 1)
        survival = np.array([self.survival**d for d in depth], np.float32)
        return self.spoil(
            Proposal(
                commit.request_id,
                commit.generation,
                len(context),
                prefix_hash(context),
                tree,
                survival,
                self.name,
            )
        )
