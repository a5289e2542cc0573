"""What is known of drafters by their trees, and the roster that follows from it: which drafters
serve, which are scored only, and which rest, by text.

A drafter with a rollout takes another one's place in steps, each of which its drafts must earn:

    SHADOW    in the sample of texts both draft, and its drafts are never verified
    CANARY    in the sample its drafts are verified, and the former's are scored
    ACTIVE    it serves all texts; in the sample the former still drafts, to be compared
    RETIRED   it has lost, and rests until its weights are others

A place is a point of a text in the sample at which both were asked.  Which of their nodes would
have been accepted there, the text itself decides, whoever was verified.  A candidate must lead
twice: where steps begin as the former's drafts let them, and where they begin as its own do.
Pure: no clock, no I/O but the log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cluster import metrics
from cluster.config.schema import Config
from cluster.core import Proposal
from cluster.metrics.recorder import Recorder
from cluster.plan.texts import HeldTree, Text
from cluster.spec.acceptance import AcceptanceModel, finite, law_name
from cluster.spec.trials import Candidate, Phase, Trial


def lot_of(request_id: str) -> float:
    """Return the lot of a request, in [0, 1), the same in every process."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=6).digest()) / 2.0**48


class Roster:
    """All drafters of a target, or of the pool, as far as not all of them simply serve."""

    def __init__(self, config: Config | None = None, names: Collection[str] = ()) -> None:
        """config: None = all simply serve.  names: of the drafters."""
        self._here: set[str] = set()
        self._hashes: dict[str, str] = {}  # of drafters' weights; the last ones of those not here
        self._faults: dict[str, int] = {}  # so far, by drafter
        self._known: dict[str, Candidate] = {}  # by name and weights: others are another drafter
        self.use(config or Config(), names)

    def use(self, config: Config, names: Collection[str]) -> None:
        """Go on by another configuration; what is known of the rollouts that stay is kept."""
        self._rollouts = {name: each for name, each in config.rollouts.items() if name in names}
        self._shadows = config.shadows
        self._max_faults = config.coordinator.breaker_failures  # so many bring a candidate down
        self._roles: list[tuple[Candidate, Phase, bool]] | None = None  # as texts were told last
        self._follow()

    def _follow(self) -> None:
        """Let drafters draft by the rollouts and by the weights that they have now."""
        self._candidates: dict[str, Candidate] = {}
        for name, rollout in self._rollouts.items():
            candidate = self._candidate(f"{name}@{self._hashes.get(name, '')}")
            candidate.rollout = rollout
            self._candidates[name] = candidate

    def _candidate(self, key: str) -> Candidate:
        if key not in self._known:
            self._known[key] = Candidate(key.rpartition("@")[0], self._max_faults)
        return self._known[key]

    def met(self, name: str, model_hash: str) -> None:
        """A drafter is here, with these weights; "" = it has none."""
        self._here.add(name)
        self._hashes[name] = model_hash
        self._follow()

    def left(self, name: str) -> None:
        """A drafter is not here any more; the one that it was to replace serves."""
        self._here.discard(name)

    def assign(self, text: Text) -> None:
        """Tell a text who of its drafters is scored only, who rests, and who drafts beside whom."""
        shadows, resting = {*self._shadows.intersection(text.names)}, set[str]()
        text.beside = {}
        for name, candidate in self._candidates.items():
            phase, in_sample = candidate.phase, text.lot < candidate.rollout.canary_share
            if not (text.is_coupled and name in self._here and name in text.names):
                phase = Phase.RETIRED
            serves = phase is Phase.ACTIVE or (phase is Phase.CANARY and in_sample)
            first, other = candidate.pair if serves else reversed(candidate.pair)
            if in_sample and phase is not Phase.RETIRED:
                shadows.add(other)
                text.beside[other] = first
            else:
                resting.add(other)
        text.shadows, text.resting = frozenset(shadows), frozenset(resting)

    def follow(self, texts: Iterable[Text]) -> None:
        """If roles have changed since the last call, tell these texts, which are all, and drop the
        trees whose drafters may have another one now."""
        roles = [(each, each.phase, name in self._here) for name, each in self._candidates.items()]
        if roles == self._roles:
            return
        self._roles = roles
        for text in texts:
            self.assign(text)
            for candidate in self._candidates.values():
                for name in candidate.pair:
                    text.held.pop(name, None)

    def trials(self, text: Text) -> Iterator[Trial]:
        """Yield the trials of a text in which both drafters were asked for their newest trees."""
        for each in self._candidates.values():
            pair = each.pair
            if (
                not text.beside.keys().isdisjoint(pair)
                and all(name in self._here and name in text.names for name in pair)
                and all(map(text.asks, pair))
            ):
                if pair not in text.trials or text.trials[pair].phase != each.phase:
                    text.trials[pair] = Trial(pair, each.phase)
                yield text.trials[pair]

    def learn(
        self, texts: Sequence[Text], error_of: Callable[[str], float], *, ends: bool = False
    ) -> None:
        """Enter the places of texts whose outcome is known by now; ends: the texts are over.

        error_of: returns the error of a drafter's calibration."""
        for text in texts:
            for trial in text.trials.values():
                candidate = self._candidates.get(trial.pair[0])
                for places in trial.take_due(text.tokens, ends=ends):
                    if candidate is not None and candidate.phase == trial.phase:
                        candidate.enter(*places, error_of(candidate.name))

    def note_faults(self, faults: Mapping[str, Mapping[str, int]]) -> None:
        """Note the faults of drafters so far, by name and reason."""
        for candidate in self._candidates.values():
            total = sum(faults.get(candidate.name, {}).values())
            num_new = total - self._faults.get(candidate.name, 0)
            self._faults[candidate.name] = total
            # Another process under its name counts from zero.
            candidate.note_faults(total if num_new < 0 else num_new)

    def record(self, recorder: Recorder) -> None:
        """Export the phases as metrics."""
        for known in self._known.values():
            for phase, count in known.changes.items():
                recorder.add(metrics.ROLLOUT_CHANGES, count, drafter=known.name, phase=phase)
            known.changes.clear()
        for each in self._candidates.values():
            recorder.set(metrics.ROLLOUT_PHASE, [*Phase].index(each.phase), drafter=each.name)
            if each.num_places:
                recorder.set(metrics.ROLLOUT_LEAD, each.lead[0], drafter=each.name)

    def table(self) -> list[dict[str, object]]:
        """Every rollout as a plain record, for status reports."""
        return [
            {
                "drafter": each.name,
                "replaces": each.rollout.replaces,
                "phase": each.phase.value,
                "is_here": each.name in self._here,
                "places": each.num_places,
                "lead": each.lead[0],
                "error": finite(each.lead[1]),
            }
            for each in self._candidates.values()
        ]

    def export(self) -> dict[str, Any]:
        """Return what is known, as plain values by the candidate's name and weights."""
        return {key: each.export() for key, each in self._known.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `export`; raises ValueError or LookupError for another form."""
        for key, each in state.items():
            candidate = self._candidate(key)
            if not candidate.num_places:
                candidate.restore(each)


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
