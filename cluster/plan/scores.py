"""What is known of drafters by their trees: how right they are, and whom to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster import metrics
from cluster.core import Proposal
from cluster.metrics.recorder import Recorder
from cluster.plan.roster import Roster
from cluster.plan.texts import HeldTree, Text
from cluster.spec.acceptance import AcceptanceModel, law_name


class DraftScores:
    """Of the drafters whose trees one process sees: a target's residents, or the pool."""

    def __init__(self, roster: Roster | None = None) -> None:
        self.acceptance = AcceptanceModel()
        self.roster = roster or Roster()

    def meet(self, drafter: str, model_hash: str) -> bool:
        """Judge a drafter by this model from now on, "" = it has none; True if that is another."""
        self.roster.met(drafter, model_hash)
        return self.acceptance.meet(drafter, model_hash)

    def keep_newest(self, text: Text, drafter: str, proposal: Proposal) -> HeldTree | None:
        """Hold a drafter's newest tree; returns None if a newer one has overtaken it."""
        held = text.keep_newest(drafter, proposal.base_len, proposal.tree, proposal.survival)
        if held is not None:
            held.is_shadow = drafter in text.shadows
            for trial in self.roster.trials(text):
                if drafter in trial.pair:
                    trial.keep(drafter, proposal)
        return held

    def score(self, texts: Sequence[Text], *, ends: bool = False) -> None:
        """Score the trees of `texts` whose outcome is known by now; ends: the texts are over."""
        due = [(text, fate) for text in texts for fate in text.due(ends=ends)]
        outcomes = self.acceptance.learn([fate for _, fate in due])
        self.roster.learn(texts, self.acceptance.calibration_error, ends=ends)
        for (text, fate), accepted in zip(due, outcomes, strict=True):
            if accepted >= 0:
                text.standing.note(fate.seen.drafter, fate.seen.base_len, accepted)

    def record(self, recorder: Recorder) -> None:
        """Export the scores of each drafter's trees, and what follows from them, as metrics."""
        for drafter, (task, is_sampled), score in self.acceptance:
            if score.num_trees:
                labels = {"drafter": drafter, "task": task, "law": law_name(is_sampled=is_sampled)}
                recorder.set(metrics.CALIBRATION_ERROR, score.calibrator.expected_error(), **labels)
                recorder.set(metrics.EXPECTED_ACCEPTED, score.accepted_of_few(), **labels)
        self.roster.record(recorder)

    def export(self) -> dict[str, Any]:
        """Return what was learned as plain values."""
        return {"scores": self.acceptance.export(), "rollouts": self.roster.export()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `export`; raises ValueError or LookupError for another form."""
        self.acceptance.restore(state["scores"])
        self.roster.restore(state.get("rollouts", {}))
