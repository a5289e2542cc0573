"""A target and drafters without networks: their laws are pure functions of the committed tokens.

They speak the very frames that real workers speak, over any link, so the round loop is tested
whole, in milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.core import (
    Commit,
    Observation,
    Proposal,
    SamplingParams,
    TokenTree,
    Verdict,
    VerifyItem,
    token_array,
)
from cluster.errors import WorkerError
from cluster.messages import (
    CacheMiss,
    CommitFrame,
    ProposalFrame,
    Refusal,
    StepReport,
    VerdictFrame,
    VerifyFrame,
    WorkerDescription,
)
from cluster.rpc.link import Link
from cluster.spec.verify import walk_draws
from cluster.token_log import prefix_hash

VOCAB_SIZE = 32


def toy_draw(context: Sequence[int], prompt_len: int, params: SamplingParams) -> int:
    """The token that follows: greedy depends on the context, sampling on seed and position too.

    The last three tokens decide, so that texts have structure a drafter can learn.
    """
    salt = 0
    if params.temperature > 0.0:
        salt = params.noise_key * 1_000_003 + params.stream * 7919 + len(context) - prompt_len + 1
    return (prefix_hash(list(context)[-3:], salt) >> 29) % VOCAB_SIZE


def plain_text(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """What decoding without any speculation emits, stop tokens excluded."""
    context = list(prompt)
    while len(context) - len(prompt) < params.max_tokens:
        token = toy_draw(context, len(prompt), params)
        if token in params.stop_token_ids:
            break
        context.append(token)
    return context[len(prompt) :]


def target_description(worker_id: str = "target-0", **limits: int) -> WorkerDescription:
    return WorkerDescription(
        worker_id, "target", "toy", model_hash="m", tokenizer_hash="t", vocab_size=VOCAB_SIZE,
        max_context_len=limits.get("max_context_len", 4096),
        max_running_sequences=limits.get("max_running_sequences", 64),
        max_batch_tokens=limits.get("max_batch_tokens", 512),
    )  # fmt: skip


def drafter_description(name: str, worker_id: str = "drafter-0") -> WorkerDescription:
    return WorkerDescription(worker_id, "drafter", name, tokenizer_hash="t")


@dataclass
class ToyTarget:
    """Answers every frame at once.  `forgets`: called per item; True drops the request's cache.

    `gate`: cleared, it holds the answers back; frames are noted in `frames` on arrival.
    step_turns: turns of the event loop that a step takes, so that drafters get to answer meanwhile.
    """

    forgets: Callable[[VerifyItem], bool] = lambda item: False
    refuses: Callable[[VerifyItem], Refusal | CacheMiss | None] = lambda item: None
    contexts: dict[str, list[int]] = field(default_factory=dict)
    params: dict[str, SamplingParams] = field(default_factory=dict)
    frames: list[VerifyFrame] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    step_turns: int = 12
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.gate.set()

    async def wait_for_frames(self, count: int) -> None:
        while len(self.frames) < count:
            self.arrived.clear()
            await self.arrived.wait()

    def describe(self) -> WorkerDescription:
        return target_description()

    async def serve(self, link: Link[VerdictFrame, VerifyFrame]) -> None:
        try:
            async for frame in link:
                self.frames.append(frame)
                self.arrived.set()
                await self.gate.wait()
                for _ in range(self.step_turns):
                    await asyncio.sleep(0)
                await link.send(self.answer(frame))
        except WorkerError:
            return
        finally:
            self.contexts.clear()  # leased to the link

    def answer(self, frame: VerifyFrame) -> VerdictFrame:
        for request_id in frame.released:
            self.contexts.pop(request_id, None)
        verdicts: list[Verdict] = []
        misses: list[CacheMiss] = []
        refusals: list[Refusal] = []
        for item in frame.items:
            refusal = self.refuses(item)
            answer = refusal or self._verify(item)
            if isinstance(answer, Verdict):
                verdicts.append(answer)
            elif isinstance(answer, CacheMiss):
                misses.append(answer)
            else:
                refusals.append(answer)
        report = StepReport(
            step_time_s=0.002,
            forward_time_s=0.001,
            num_sequences=len(verdicts),
            num_nodes=sum(len(item.tree) for item in frame.items),
            pages_in_use=len(self.contexts),
            pages_total=100,
        )
        return VerdictFrame(tuple(verdicts), tuple(misses), tuple(refusals), report)

    def _verify(self, item: VerifyItem) -> Verdict | CacheMiss:
        if self.forgets(item):
            self.contexts.pop(item.request_id, None)
        held = self.contexts.get(item.request_id, [])
        if item.base_len > len(held) or item.prefix_hash != prefix_hash(held[: item.base_len]):
            return CacheMiss(
                item.request_id, item.generation, 0 if item.base_len <= len(held) else len(held)
            )
        if item.params is not None:
            self.params[item.request_id] = item.params
        elif item.base_len == 0:
            raise AssertionError("an item that opens a request must bring its params")
        params = self.params[item.request_id]
        context = held[: item.base_len] + item.delta.tolist()
        paths: list[list[int]] = []
        for token, parent in zip(
            item.tree.token_ids.tolist(), item.tree.parents.tolist(), strict=True
        ):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        draws = [toy_draw(context + path, item.prompt_len, params) for path in [[], *paths]]
        path, token_ids = walk_draws(item.tree, token_array(draws))
        self.contexts[item.request_id] = context + token_ids[:-1].tolist()
        return Verdict(item.request_id, item.generation, len(context), path, token_ids)


Grow = Callable[[list[int], Commit], TokenTree]


def oracle_chain(length: int = 4) -> Grow:
    """Drafts exactly what the target will draw."""

    def grow(context: list[int], opened: Commit) -> TokenTree:
        assert opened.params is not None
        ahead = list(context)
        for _ in range(length):
            ahead.append(toy_draw(ahead, opened.prompt_len, opened.params))
        return TokenTree.chain(ahead[len(context) :])

    return grow


def random_tree(seed: int, num_nodes: int = 8) -> Grow:
    """A random tree of random tokens: right now and then, by chance."""
    generator = np.random.default_rng(seed)

    def grow(context: list[int], opened: Commit) -> TokenTree:
        tokens = generator.integers(0, VOCAB_SIZE, num_nodes).tolist()
        parents = [int(generator.integers(-1, node)) if node else -1 for node in range(num_nodes)]
        return _unique(tokens, parents)

    return grow


def _unique(tokens: list[int], parents: list[int]) -> TokenTree:
    """Drop siblings that repeat a token, with all below them."""
    kept: dict[int, int] = {-1: -1}
    edges: set[tuple[int, int]] = set()
    out: list[tuple[int, int]] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent in kept and (kept[parent], token) not in edges:
            edges.add((kept[parent], token))
            kept[node] = len(out)
            out.append((token, kept[parent]))
    return TokenTree.of([token for token, _ in out], [parent for _, parent in out])


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
        return _unique(tokens, parents)

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
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    devices: tuple[str, ...] = ()
    model_hash: str = ""

    def __post_init__(self) -> None:
        self.gate.set()

    def describe(self) -> WorkerDescription:
        return drafter_description(self.name)

    async def serve(self, link: Link[ProposalFrame, CommitFrame]) -> None:
        try:
            async for frame in link:
                self.frames.append(frame)
                self.arrived.set()
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
        return ProposalFrame(tuple(proposals), tuple(observations), num_requests=len(self.contexts))

    def _propose(self, commit: Commit, context: list[int]) -> Proposal:
        tree = self.grow(context, self.opened[commit.request_id])
        depth: list[int] = []
        for parent in tree.parents.tolist():
            depth.append(1 if parent < 0 else depth[parent] + 1)
        survival = np.array([self.survival**d for d in depth], dtype=np.float32)
        return self.spoil(
            Proposal(
                commit.request_id, commit.generation, len(context), prefix_hash(context), tree,
                survival, self.name,
            )
        )  # fmt: skip
