"""One link's part of a draft worker: its requests' names there, and the news to send.

The growth thread puts results in; the link's writer, on its event loop, takes frames out.  Only the
newest news of each kind and request is kept: a link that could not send for a while then sends only
the last proposal of each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from cluster.core import Commit, Observation, Proposal, TokenTree
from cluster.messages import ProposalFrame, Refusal
from cluster.records import frozen
from cluster.worker.mailbox import LinkEnd

News = Proposal | Observation | Refusal
T = TypeVar("T", bound=News)


@frozen
class DrafterLoad:
    """KV pages (0 without an engine) and requests of the whole drafter."""

    pages_in_use: int = 0
    pages_total: int = 0
    num_requests: int = 0


class DraftLease(LinkEnd):
    """One link's requests and its outbox.  load: the load of the last `put`."""

    # Each request has a few, for of each kind the newest is kept.
    what, max_unread = "notices", 2**16

    def __init__(self, number: int) -> None:
        """number: the name space of the link's request ids."""
        self._news: dict[tuple[type[News], str], News] = {}  # by kind and request
        super().__init__(number, self._news)
        self.load = DrafterLoad()
        self._draft_time_s = 0.0  # not told yet

    def named(self, commit: Commit) -> Commit:
        """The commit under its name within the drafter."""
        # By hand: dataclasses.replace takes several times as long in every round.
        return Commit(
            self.inside(commit.request_id),
            commit.generation,
            commit.base_len,
            commit.prefix_hash,
            commit.token_ids,
            commit.prompt_len,
            commit.max_nodes,
            commit.task,
            commit.params,
            commit.tenant,
        )

    def take(self) -> Sequence[ProposalFrame]:
        """Return all news since the last frame in one."""
        if self._is_finished:
            return ()
        news, load = list(self._news.values()), self.load
        self._news.clear()
        draft_time_s, self._draft_time_s = self._draft_time_s, 0.0
        frame = ProposalFrame(
            _of(Proposal, news),
            _of(Observation, news),
            _of(Refusal, news),
            load.pages_in_use,
            load.pages_total,
            load.num_requests,
            draft_time_s,
        )
        return [frame]

    def put(self, news: Sequence[News], load: DrafterLoad, draft_time_s: float) -> None:
        """Queue news; for each kind and request they replace those that are not sent yet.

        draft_time_s: of the drafter, that no link was told of yet.
        """
        self.load = load
        self._call_soon(self._put, news, draft_time_s)

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Drop unsent news about released requests, except refusals."""
        self._call_soon(self._withdraw, request_ids)

    # On the event loop

    def _put(self, news: Sequence[News], draft_time_s: float) -> None:
        self._draft_time_s += draft_time_s
        for each in news:
            if isinstance(each, Refusal):
                self._withdraw([each.request_id])
            self._news[type(each), each.request_id] = each
        self._wake.set()

    def _withdraw(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            for kind in (Proposal, Observation):
                self._news.pop((kind, request_id), None)


def _of(kind: type[T], news: Iterable[News]) -> tuple[T, ...]:
    return tuple(each for each in news if isinstance(each, kind))


def renamed(proposal: Proposal, request_id: str) -> Proposal:
    """Return a copy of `proposal` under another id.

    It has its own arrays: in-process links pass references, and drafters reuse arrays.
    """
    tree = TokenTree(proposal.tree.token_ids.copy(), proposal.tree.parents.copy())
    return Proposal(
        request_id,
        int(proposal.generation),
        int(proposal.base_len),
        int(proposal.prefix_hash),
        tree,
        proposal.survival.copy(),
        proposal.drafter,
        bool(proposal.is_complete),
    )
