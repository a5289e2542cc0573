"""The pool's trees of a text as one: calibrated, merged, and sent to its target."""

from __future__ import annotations

import asyncio

from cluster.coordinator.pool_scores import POOL_NODES, PoolScores
from cluster.coordinator.session import Session
from cluster.messages import PoolTree
from cluster.plan.fence import Fence
from cluster.plan.offers import gather, look_at
from cluster.spec.tree import prune


class PoolTrees:
    """Merges the trees of all texts that got a new one, in one turn of the event loop."""

    def __init__(self, scores: PoolScores, fence: Fence) -> None:
        self._scores = scores
        self._merging = fence.section("pool trees")
        self._renewed: dict[str, Session] = {}
        self._num_merges = 0

    def renewed(self, session: Session) -> None:
        """A drafter has sent a tree for what is committed at present."""
        if not self._renewed:
            asyncio.get_running_loop().call_soon(self._merge)
        self._renewed[session.id] = session

    def _merge(self) -> None:
        sessions = [each for each in self._renewed.values() if each.target is not None]
        self._renewed.clear()
        with self._merging:
            self._send(sessions)

    def _send(self, sessions: list[Session]) -> None:
        texts = [each.text for each in sessions]
        offers = gather(texts, self._scores.acceptance)
        self._num_merges += 1
        look_at(texts, self._num_merges)
        if offers is None:
            return
        bounds = offers.forest.starts.tolist()
        for session, tree, start, stop in zip(
            sessions, offers.forest.split(), bounds, bounds[1:], strict=False
        ):
            if start == stop or session.target is None:
                continue
            kept, survival, places = prune(tree, offers.survival[start:stop], POOL_NODES)
            tokens = session.tokens
            session.target.tell(
                PoolTree(
                    session.id,
                    session.generation,
                    len(tokens),
                    tokens.hash_at(len(tokens)),
                    kept,
                    survival,
                    offers.sources[start:stop][places],
                    tuple(session.text.weights.get(name, 0.0) for name in session.text.names),
                )
            )
