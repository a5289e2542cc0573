"""The worth of the pool's drafters, and how much each is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config.schema import Config
from cluster.coordinator.present import Answered
from cluster.plan.roster import DraftScores
from cluster.plan.texts import MAX_LAG, Text

# Nodes that a pool drafter is asked for (and a target sent), of one text and of all of a target:
# broader trees more often go on behind the next commits; but the coordinator reads all of it.
POOL_NODES = 64
_POOL_NODES_OF_ALL = 512
# Steps without a verified draft after which a drafter is told less.
_UNUSED_STEPS = 8


class PoolScores(DraftScores):
    """Only the coordinator sees these drafters' trees, so it keeps their calibration."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.use(config)

    def use(self, config: Config) -> None:
        """Go on by another configuration; what was learned stays."""
        self.is_adaptive = config.coordinator.budget == "adaptive"
        self.roster.use(config, config.pool)

    def ask(self, text: Text, num_texts: int, *, is_model: bool) -> int:
        """How many nodes a drafter may grow behind the next commit; it always may some.

        is_model: it keeps what it has grown; look-ups would build a broad tree anew each time.
        """
        most = POOL_NODES if text.max_draft_tokens else 0
        if is_model or not self.is_adaptive:
            return most  # beyond what a step takes, for the rest survives the re-rooting
        return min(max(_POOL_NODES_OF_ALL // num_texts, 1), most)

    def commit_lag(
        self, text: Text, drafter: str, num_unused: int, num_texts: int, *, is_shared: bool
    ) -> int:
        """Tokens of `text` that may be kept back from a drafter, and one: 1 = none.

        Reading its trees costs time, in a crowd above all.  num_unused: steps since one was last
        verified.  is_shared: it drafts on the target's cores.
        """
        is_compared = drafter in (*text.beside, *text.beside.values())
        if not self.is_adaptive or num_unused < _UNUSED_STEPS or is_compared:
            return 1
        # On the target's cores a commit costs as much as some tokens: fewer and fewer are sent.
        if is_shared:
            return min(num_unused, MAX_LAG)
        return min(max(num_texts // 2, 1), _UNUSED_STEPS)

    def hear(self, answers: Sequence[Answered]) -> None:
        """Score the trees of texts that go on, or are over."""
        for ends in (False, True):
            self.score(
                [each.session.text for each in answers if each.session.is_over is ends], ends=ends
            )
