"""The worth of the pool's drafters, and how much each is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.config.schema import Config
from cluster.coordinator.present import Answered
from cluster.plan.roster import Roster
from cluster.plan.scores import DraftScores
from cluster.plan.texts import Text

# Nodes that a pool drafter is asked for (and a target sent), of one text and of all of a target:
# broader trees more often go on behind the next commits; but the coordinator reads all of it.
POOL_NODES = 64
_POOL_NODES_OF_ALL = 512
# Steps without a verified draft after which a drafter is told less.
_UNUSED_STEPS = 8
_MAX_LAG = 64  # tokens that a pool drafter may lack: they are read in one commit later
_STATE_VERSION = 5  # of what `export` gives


class PoolScores(DraftScores):
    """Only the coordinator sees these drafters' trees, so it keeps their calibration."""

    def __init__(self, *, is_adaptive: bool, roster: Roster | None = None) -> None:
        super().__init__(roster)
        self.is_adaptive = is_adaptive

    @classmethod
    def of(cls, config: Config) -> PoolScores:
        is_adaptive = config.coordinator.budget == "adaptive"
        return cls(is_adaptive=is_adaptive, roster=Roster.of(config, config.pool))

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
        return min(max(_POOL_NODES_OF_ALL // max(num_texts, 1), 1), most)

    def commit_lag(self, text: Text, drafter: str, num_texts: int, *, is_shared: bool) -> int:
        """Tokens of `text` that may be kept back from a drafter, and one: 1 = none.

        Reading its trees costs time, in a crowd above all.  is_shared: it drafts on target's cores.
        """
        num_unused = text.num_unused(drafter)
        if not self.is_adaptive or num_unused < _UNUSED_STEPS or self.roster.tries(drafter, text):
            return 1
        # On the target's cores a commit costs as much as some tokens: fewer and fewer are sent.
        if is_shared:
            return min(num_unused, _MAX_LAG)
        return min(max(num_texts // 2, 1), _UNUSED_STEPS)

    def hear(self, answers: Sequence[Answered]) -> None:
        """Score the trees of texts that go on, or are over."""
        for ends in (False, True):
            self.score(
                [each.session.text for each in answers if each.session.is_over is ends], ends=ends
            )

    def export(self) -> dict[str, Any]:
        """Return what was learned, as one small record of plain values."""
        return {"version": _STATE_VERSION, **super().export()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `export` gave; ValueError where it is of another version or form."""
        if state.get("version") != _STATE_VERSION:
            raise ValueError(f"a record of version {state.get('version')}, not {_STATE_VERSION}")
        super().restore(state)
