"""A drafter's open requests: their committed text, and the rules for commits that extend it.

These rules of `Drafter.observe` are the same for every drafter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, Self, TypeVar

from cluster.core import (
    Commit,
    FloatArray,
    Observation,
    Proposal,
    SamplingParams,
    TokenArray,
    TokenTree,
)
from cluster.draft.base import DrafterContext, DraftTask
from cluster.spec.token_log import TokenLog, common_prefix_len


@dataclass(slots=True, eq=False)
class RequestState:
    """The state that every drafter keeps per request; drafters extend it.

    renewed: a commit changed the generation, the prompt length or the parameters, so trees grown
    before are invalid even if the text is the same.  The drafter resets it.
    """

    generation: int
    prompt_len: int
    task: str
    params: SamplingParams
    text: TokenLog = field(default_factory=TokenLog)
    renewed: bool = False
    tenant: bytes = b""
    request_id: str = ""

    @classmethod
    def opened_by(cls, commit: Commit) -> Self:
        """The state of the request that `commit` opens, without text."""
        return cls(
            commit.generation,
            commit.prompt_len,
            commit.task,
            commit.params or SamplingParams(),
            tenant=commit.tenant,
            request_id=commit.request_id,
        )

    @property
    def circle(self) -> tuple[bytes, str]:
        """The texts that this one may learn from, and teach: its tenant's of its task class."""
        return self.tenant, self.task

    @property
    def group(self) -> tuple[str, bool]:
        """Those that learn together how sure drafts are: a task class, greedy and sampled apart."""
        return self.task, self.params.temperature == 0.0

    @property
    def next_position(self) -> int:
        """Output position of the token that follows the committed text."""
        return len(self.text) - self.prompt_len

    def proposed(
        self, tree: TokenTree, survival: FloatArray, drafter: str, *, is_complete: bool = True
    ) -> Proposal:
        """A tree behind the committed text."""
        length = len(self.text)
        return Proposal(
            self.request_id,
            self.generation,
            length,
            self.text.hash_at(length),
            tree,
            survival,
            drafter,
            is_complete,
        )


T = TypeVar("T")
State = TypeVar("State", bound=RequestState)


class RequestTable(Generic[State]):
    """The requests of one drafter, at most `max_requests`.

    A request beyond the limit is declined (have_len 0).  Evicting a running request instead would
    make a full table prefill every prompt again and again.
    """

    def __init__(self, max_requests: int, open_request: Callable[[Commit], State]) -> None:
        self._states: dict[str, State] = {}
        self._max_requests = max_requests
        self._open = open_request

    def __iter__(self) -> Iterator[State]:
        return iter(self._states.values())

    def get(self, request_id: str, generation: int) -> State | None:
        state = self._states.get(request_id)
        return state if state is not None and state.generation == generation else None

    def find(self, request_id: str) -> State | None:
        return self._states.get(request_id)

    def pop(self, request_id: str) -> State | None:
        return self._states.pop(request_id, None)

    def admit(self, commit: Commit) -> State | None:
        """The state that `commit` extends, opened if necessary; None if the commit is refused.

        The caller then truncates the text to commit.base_len and appends commit.token_ids.
        """
        state = self._states.get(commit.request_id)
        if state is None:
            if (
                len(self._states) >= self._max_requests
                or commit.base_len != 0
                or commit.prefix_hash != 0
            ):
                return None
            state = self._open(commit)
            self._states[commit.request_id] = state
            return state
        if commit.generation < state.generation or not 0 <= commit.base_len <= len(state.text):
            return None
        if state.text.hash_at(commit.base_len) != commit.prefix_hash:
            return None
        former = (state.generation, state.prompt_len, state.params)
        state.generation, state.prompt_len = commit.generation, commit.prompt_len
        if commit.params is not None:  # task and tenant are sent with the parameters
            state.task, state.params = commit.task, commit.params
            state.tenant = commit.tenant
        state.renewed |= former != (state.generation, state.prompt_len, state.params)
        return state

    def declined(self, commit: Commit) -> Observation:
        """The answer to a refused commit: how many tokens of that text the drafter has."""
        state = self._states.get(commit.request_id)
        if state is None:
            return Observation(commit.request_id, commit.generation, 0)
        held = len(state.text)
        if (
            0 <= commit.base_len <= held
            and state.text.hash_at(commit.base_len) != commit.prefix_hash
        ):
            held = 0  # a different text with the same id: start over
        return Observation(commit.request_id, max(commit.generation, state.generation), held)


class CommittedTextDrafter(ABC, Generic[State]):
    """The part of a drafter that follows its requests' texts."""

    def __init__(self, context: DrafterContext, open_request: Callable[[Commit], State]) -> None:
        self._name = context.name
        self._max_nodes = context.max_nodes
        self._requests: RequestTable[State] = RequestTable(context.max_requests, open_request)

    @abstractmethod
    def _forget_tree(self, request: State) -> None:
        """Drop what was grown behind the text: it is invalid, though the text may be the same."""

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        """See `Drafter.observe`."""
        return [self._observe(commit) for commit in commits]

    def _observe(self, commit: Commit) -> Observation:
        request = self._requests.admit(commit)
        if request is None:
            return self._requests.declined(commit)
        if request.renewed:
            request.renewed = False
            self._forget_tree(request)
        if not request.text.ends_with(commit.token_ids, commit.base_len):
            kept_len = common_len(request.text, commit)
            self._advance(request, kept_len, commit.token_ids[kept_len - commit.base_len :])
        return Observation(commit.request_id, commit.generation, len(request.text))

    def _advance(self, request: State, kept_len: int, token_ids: TokenArray) -> None:
        """Let the text be its first `kept_len` tokens and these."""
        request.text.truncate(kept_len)
        request.text.append(token_ids)
        self._forget_tree(request)

    def _asked(self, tasks: Sequence[DraftTask]) -> list[tuple[State, int]]:
        """The known requests that nodes are asked for, with how many at most."""
        asked: dict[str, tuple[State, int]] = {}
        for task in tasks:
            request = self._requests.get(task.request_id, task.generation)
            if request is not None and task.max_nodes > 0:
                asked[task.request_id] = (request, min(task.max_nodes, self._max_nodes))
        return list(asked.values())

    def release(self, request_ids: Sequence[str]) -> None:
        """See `Drafter.release`."""
        for request_id in request_ids:
            self._requests.pop(request_id)


# Names of task classes and tenants come from clients, so their number is not trusted.
_MAX_KEYS = 256


def by_key(make: Callable[[], T], bound: int = _MAX_KEYS) -> Callable[[Hashable], T]:
    """Return what gives the thing of a key, such as a `RequestState.group`, made at the first time;
    the last `bound` are kept."""
    return lru_cache(bound)(lambda key: make())


@dataclass(slots=True, eq=False)
class DraftedRequest(RequestState):
    """drafted_nodes: the max_nodes that the present text was drafted for, -1 = not drafted yet."""

    drafted_nodes: int = -1


Drafted = TypeVar("Drafted", bound=DraftedRequest)


class WholeTreeDrafter(CommittedTextDrafter[Drafted]):
    """Drafts once after every commit: a tree is grown completely and proposed once."""

    @abstractmethod
    def _drafts(
        self, asked: Sequence[tuple[Drafted, int]]
    ) -> Iterable[tuple[Drafted, TokenTree, FloatArray]]:
        """The trees of these requests with at most so many nodes each, and their survival."""

    def _forget_tree(self, request: Drafted) -> None:
        request.drafted_nodes = -1

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`."""
        asked = [each for each in self._asked(tasks) if each[0].drafted_nodes < each[1]]
        found = [
            request.proposed(tree, survival, self._name)
            for request, tree, survival in self._drafts(asked)
            if len(tree)
        ]
        for request, max_nodes in asked:  # not before: a batch that raises is repeated one by one
            request.drafted_nodes = max_nodes
        return found


def common_len(text: TokenLog, commit: Commit) -> int:
    """How many tokens of `text` remain when `commit`, already admitted, is applied."""
    base_len = commit.base_len
    return base_len + common_prefix_len(text.since(base_len), commit.token_ids)


def commit_of(
    text: RequestState,
    max_nodes: int,
    known: Observation | None,
    told: Callable[[SamplingParams], SamplingParams],
) -> Commit:
    """What a drafter that holds `known` lacks of a text.

    told: gives what it is told of the parameters; asked for a text that opens alone, for it costs
    more than the rest of a commit."""
    tokens = text.text
    base_len = min(known.have_len, len(tokens)) if known else 0  # it may have been cut since
    opens = base_len == 0 or known is None or known.generation != text.generation
    return Commit(
        text.request_id,
        text.generation,
        base_len,
        tokens.hash_at(base_len),
        tokens.since(base_len),
        text.prompt_len,
        max_nodes,
        text.task,
        told(text.params) if opens else None,
        text.tenant if opens else b"",
    )
