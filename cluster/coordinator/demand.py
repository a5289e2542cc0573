"""What each drafter is asked for with each commit, by what the targets took of it lately."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from cluster import metrics
from cluster.config import CoordinatorConfig
from cluster.coordinator.in_flight import InFlight
from cluster.coordinator.replica import DrafterReplica
from cluster.coordinator.session import Seat, Session
from cluster.core import TokenArray
from cluster.metrics import Recorder
from cluster.spec.demand import MAX_LAG, Demand, DemandBook, Place, Used, demand_apart
from cluster.spec.patience import Mode
from cluster.spec.tree_check import MAX_PROPOSED_NODES

# Trees that are already known when a verdict comes in are what the next batch is made of, so a
# drafter may be asked for more nodes than one step verifies: the rest survives the re-rooting.
SHADOW_FACTOR = 3
# A drafter whose drafting for a commit takes less than this share of a sequence's share of a step
# is cheap: asking it in vain is hardly noticed.
_CHEAP_SHARE = 0.1
_NOTHING = Used()
_SILENT = Demand(Mode.PARKED, 0)
_MAX_TERMS = 1024


def are_apart(replica: DrafterReplica, seat: Seat | None) -> bool:
    """Whether a drafter and the target share no device, by what both say they compute on.

    Then what it computes costs the target nothing: it is never silenced, and never parked.
    """
    if seat is None or not (replica.devices and seat.devices):
        return False
    return replica.devices.isdisjoint(seat.devices)


def share_devices(replica: DrafterReplica, seat: Seat | None) -> bool:
    """Whether it slows the target down when it computes, as far as their devices are known."""
    return seat is not None and not replica.devices.isdisjoint(seat.devices)


class DraftDemand:
    """Applies the policy of `spec/demand.py` to sessions; a fixed budget asks for all, always."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._book = DemandBook() if config.budget == "adaptive" else None
        self._known_terms: dict[
            tuple[str, str, str, str], tuple[tuple[int, int], tuple[Place, bool]]
        ] = {}
        self._num_commits: dict[tuple[str, str, str], int] = {}
        self._num_nodes: dict[tuple[str, str], int] = {}
        self._num_skipped: Counter[tuple[tuple[str, ...], str]] = Counter()  # by drafters and task

    @property
    def learns(self) -> bool:
        """Whether it matters what became of the drafts."""
        return self._book is not None

    def skips(self, session: Session, drafters: tuple[str, ...]) -> bool:
        """Whether none of `drafters` needs to hear of the next commit of `session`: they are
        silent, and have heard lately.  To be asked for every commit, before `of`.

        drafters: those of the session that are not apart from its target.

        Those that know the session hear the first one, which tells them to stop.  Those that do
        not know it would have to read its prompt: a short text is over before that is of use.

        To be woken for every step would cost the target as much as a little drafting, and to look
        at every drafter of every sequence a percent of a plain step.
        """
        seat = session.target
        is_asked = self._book is not None and bool(drafters)
        if not is_asked or seat is None or not seat.silences[session.in_sampled_batch]:
            session.num_silent_commits = 0
            return False
        session.num_silent_commits += 1
        is_stop = session.num_silent_commits == 1 and bool(session.subscriptions)
        if is_stop or session.num_silent_commits % MAX_LAG == 0:
            return False
        self._num_skipped[drafters, session.request.task] += 1
        return True

    def passes_over(self, session: Session, name: str, *, is_model: bool) -> bool:
        """Whether drafter `name`, which is silent, needs to hear nothing of a commit that is not
        skipped: it is silent for a long time still, and a model, which learns nothing from texts
        that are over by then.

        Look-ups hear: what they are told now is what they will draft from.
        """
        if not is_model or session.target is None:
            return False
        if session.num_silent_commits == 1 and name in session.subscriptions:
            return False  # it hears that it is to stop
        if session.target.silences[session.in_sampled_batch] <= MAX_LAG:
            return False
        self._num_skipped[(name,), session.request.task] += 1
        return True

    def of(
        self, session: Session, replica: DrafterReplica, used: Mapping[str, Used] | None
    ) -> Demand:
        """What to ask of `replica` with the next commit of `session`.

        used: by drafter, in the step that led to it; None = there was none.
        """
        task = session.request.task
        limit = min(session.max_draft_tokens * SHADOW_FACTOR, MAX_PROPOSED_NODES)
        seat, is_apart = session.target, are_apart(replica, session.target)
        if self._book is None or seat is None:
            demand = Demand(Mode.GROWING, limit)
        elif is_apart:
            # Look-ups do not keep what they grew: a broad tree would take its time each time.
            is_broad = bool(replica.description.model_hash)
            demand = demand_apart(self._terms(seat, replica, task)[0], limit, is_broad=is_broad)
        elif session.num_silent_commits:
            demand = _SILENT
        else:
            place, is_cheap = self._terms(seat, replica, task)
            demand = self._book.decide(
                session.id,
                replica.name,
                place,
                None if used is None else used.get(replica.name, _NOTHING),
                limit,
                is_cheap=is_cheap,
            )
        # By the mode's plain string: an enumeration's own hash is slow.
        key = (replica.name, task, demand.mode._value_)
        self._num_commits[key] = self._num_commits.get(key, 0) + 1
        if demand.max_nodes:
            self._num_nodes[key[:2]] = self._num_nodes.get(key[:2], 0) + demand.max_nodes
            if seat is not None and not is_apart:
                seat.asked_in_round = seat.num_rounds
        return demand

    def _terms(self, seat: Seat, replica: DrafterReplica, task: str) -> tuple[Place, bool]:
        """(place, whether the drafter is cheap there): the same for all sessions of a task that are
        committed to in one round."""
        key = (seat.id, replica.name, replica.id, task)
        as_of = (seat.num_rounds, seat.num_sessions)
        known = self._known_terms.get(key)
        if known is not None and known[0] == as_of:
            return known[1]
        num_sequences = max(seat.num_sessions, 1)
        share_s, cost_s = seat.step_time_s / num_sequences, replica.draft_cost_s
        is_cheap = cost_s is not None and cost_s <= _CHEAP_SHARE * share_s
        terms = Place(seat.id, task, num_sequences), is_cheap
        if len(self._known_terms) >= _MAX_TERMS:
            self._known_terms.clear()
        self._known_terms[key] = (as_of, terms)
        return terms

    def offered(self, session: Session, drafter: str) -> None:
        """A tree for `session` has come."""
        if self._book is not None:
            self._book.offered(session.id, drafter)

    def release(self, session: Session) -> None:
        if self._book is not None:
            self._book.release(session.id)

    def forget(self, drafter: str) -> None:
        """A replica of `drafter` has joined, and may draft better than those before."""
        if self._book is not None:
            self._book.forget(drafter)

    def record(self, recorder: Recorder) -> None:
        """Export what was counted since the last call; not on the way of a round."""
        for (drafters, task), count in self._num_skipped.items():
            for drafter in drafters:
                key = (drafter, task, Mode.PARKED.value)
                self._num_commits[key] = self._num_commits.get(key, 0) + count
        self._num_skipped.clear()
        for (drafter, task, mode), count in self._num_commits.items():
            recorder.add(metrics.DRAFTER_COMMITS, count, drafter=drafter, task=task, demand=mode)
        for (drafter, task), num_nodes in self._num_nodes.items():
            recorder.add(metrics.DRAFT_DEMAND, num_nodes, drafter=drafter, task=task)
        self._num_commits.clear()
        self._num_nodes.clear()


def used_by_drafter(in_flight: InFlight, path: TokenArray) -> dict[str, Used]:
    """What each drafter had proposed of the nodes in flight, and of the accepted ones in `path`.

    Those that had proposed none are left out.
    """
    if not in_flight.drafters:
        return {}
    counts = zip(
        in_flight.drafters, in_flight.num_proposed, in_flight.num_accepted(path), strict=True
    )
    return {name: Used(taken, accepted) for name, taken, accepted in counts if taken}
