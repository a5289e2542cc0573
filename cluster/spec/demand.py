"""How many nodes a drafter is asked for with a commit: none where nobody takes them.

A drafter whose nodes are verified is asked for about twice as many as were taken of late, so that
its tree outlives the next commit.  One whose nodes are not is *parked*: it hears what is committed
and computes nothing.  It is probed after 32 commits, 64, 128 and so on, and at once when the load
has fallen.  What is learned is shared by the sessions of one task at one target under one load
(their *group*): new sessions start as the group stands, and in a parked group a few of them probe
for all.

Everything is counted in commits: there is no clock in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cluster.records import record
from cluster.spec.patience import (
    DOUBTFUL,
    REFUSED,
    Asked,
    Backoff,
    Group,
    Load,
    Mode,
    group_patience,
)

# What is asked for where next to nothing was taken, and while nobody knows.
MIN_NODES = 4
PROBE_NODES = 8
# What a model on devices of its own is asked for: there drafting costs the target nothing, and the
# broader the tree, the more often it goes on behind the next commit.  All sessions of a target
# share the latter, for the coordinator reads whatever is sent.
APART_NODES = 64
_APART_NODES_OF_ALL = 512
# A parked drafter may lag behind the text by so many commits: hearing them costs something, too.
MAX_LAG = 16

# Share of what was taken last time that still counts one round later; per commit in a group.
_MEMORY = 7 / 8
_GROUP_MEMORY = 63 / 64
_MAX_GROUPS = 4096


@record(frozen=True, slots=True)
class Place:
    """Where a session is decoded: among num_sequences of target_id, itself included."""

    target_id: str
    task: str
    num_sequences: int
    level: int = field(init=False)  # the load in doublings: 0 for one sequence, 5 for 17 to 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "level", max(self.num_sequences - 1, 0).bit_length())


@record(frozen=True, slots=True)
class Used:
    """How many nodes of a drafter were in a step, and how many of them were accepted."""

    num_taken: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """max_nodes: what the drafter may grow, 0 = nothing.  is_told: it is to hear of this commit
    now; otherwise it will with a later one."""

    mode: Mode
    max_nodes: int
    is_told: bool = True


def demand_apart(place: Place, limit: int, *, is_broad: bool) -> Demand:
    """What to ask of a drafter that shares no device with the target: drafts, always.

    limit: as in `DemandBook.decide`.  is_broad: it keeps what it has grown.
    """
    num_nodes = min(max(limit >> place.level, MIN_NODES), limit)
    share = min(_APART_NODES_OF_ALL // place.num_sequences, APART_NODES) if is_broad else 0
    return Demand(Mode.GROWING, max(num_nodes, share))


class DemandBook:
    """Decides the demand of every commit.  A few microseconds a call."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._groups: dict[tuple[str, str, str, int], Group] = {}
        self._asked: dict[str, dict[str, Asked]] = {}

    def decide(
        self,
        session_id: str,
        drafter: str,
        place: Place,
        used: Used | None,
        limit: int,
        *,
        is_cheap: bool = False,
    ) -> Demand:
        """What to ask of `drafter` with the next commit of a session.

        used: of its nodes, in the step that led to the commit; None = there was no step.
        limit: most nodes that may be asked for, above 0.  is_cheap: its drafts cost next to nothing
        beside a step.
        """
        level = place.level
        num_drops = self._num_drops(place, level)
        group = self._group(drafter, place, level, num_drops)
        asked = self._of(session_id, drafter, group, num_drops)
        if used is not None:
            self._note(asked, group, used, place.num_sequences, is_cheap=is_cheap)
        self._turn(asked, group)
        if asked.mode is Mode.PARKED:
            is_told = asked.num_untold % MAX_LAG == 0
            asked.num_untold += 1
            return Demand(Mode.PARKED, 0, is_told)
        asked.num_untold = 0
        return Demand(asked.mode, min(self._num_nodes(asked, group, limit, level), limit))

    def offered(self, session_id: str, drafter: str) -> None:
        """A tree of the drafter has come; unknown sessions are no error."""
        asked = self._asked.get(session_id, {}).get(drafter)
        if asked is not None:
            asked.has_offered = True

    def release(self, session_id: str) -> None:
        """The session is over; an unknown one is no error."""
        self._asked.pop(session_id, None)

    def forget(self, drafter: str) -> None:
        """Another drafter goes by that name now: what was learned of the former one is void."""
        self._groups = {key: value for key, value in self._groups.items() if key[1] != drafter}
        for asked in self._asked.values():
            asked.pop(drafter, None)

    def _num_drops(self, place: Place, level: int) -> int:
        load = self._loads.get(place.target_id)
        if load is None:
            load = self._loads[place.target_id] = Load(level)
        if level != load.level:
            load.num_drops += level < load.level
            load.level = level
        return load.num_drops

    def _group(self, drafter: str, place: Place, level: int, num_drops: int) -> Group:
        key = (place.target_id, drafter, place.task, level)
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= _MAX_GROUPS:
                # Tasks are named by clients; the oldest one makes room.
                del self._groups[next(iter(self._groups))]
            # What does not pay for few sequences will hardly pay for more; a few find that out.
            lower = (self._groups.get((*key[:3], below)) for below in range(level))
            is_parked = any(other.is_parked for other in lower if other is not None)
            group = self._groups[key] = Group(is_parked, num_drops, Backoff())
        elif group.num_drops != num_drops:
            group.num_drops, group.backoff.countdown = num_drops, 0
        return group

    def _of(self, session_id: str, drafter: str, group: Group, num_drops: int) -> Asked:
        by_drafter = self._asked.setdefault(session_id, {})
        asked = by_drafter.get(drafter)
        if asked is None:
            mode = Mode.PARKED if group.is_parked else Mode.GROWING
            asked = by_drafter[drafter] = Asked(mode, num_drops, Backoff())
            # It has not read the prompt; where it is not asked anyway, that can wait.
            asked.num_untold = int(group.is_parked)
        elif asked.num_drops != num_drops:
            asked.num_drops, asked.backoff = num_drops, Backoff()
        return asked

    @staticmethod
    def _note(
        asked: Asked, group: Group, used: Used, num_sequences: int, *, is_cheap: bool
    ) -> None:
        """A step has passed."""
        asked.recent = max(float(used.num_taken), asked.recent * _MEMORY)
        group.recent = max(float(used.num_taken), group.recent * _GROUP_MEMORY)
        patience = group_patience(num_sequences, is_cheap=is_cheap)
        if used.num_accepted:
            group.hit(used.num_accepted, patience, is_cheap=is_cheap)
            asked.begin(Mode.PROBING if group.is_parked else Mode.GROWING)
            asked.backoff = Backoff()
            return
        if asked.mode is Mode.PARKED:
            asked.backoff.countdown -= 1
        else:
            is_refused = asked.has_offered and not used.num_taken
            cost = REFUSED if is_refused else DOUBTFUL
            asked.quiet += cost
            group.quiet += cost
            if asked.quiet >= asked.patience(is_cheap=is_cheap):
                asked.begin(Mode.PARKED)
                if not group.is_parked:  # else it was no fault of this text
                    asked.backoff.extend(is_cheap=is_cheap)
        if group.is_parked:
            group.count_down(num_sequences, is_cheap=is_cheap)
        elif group.quiet >= patience:
            group.park(is_cheap=is_cheap)

    @staticmethod
    def _turn(asked: Asked, group: Group) -> None:
        """Follow the group, and begin to probe where it is time."""
        if group.is_parked and asked.mode is Mode.GROWING:
            asked.begin(Mode.PARKED)
            asked.backoff = Backoff()  # it goes on as soon as the group does
        if asked.mode is not Mode.PARKED:
            return
        if not group.is_parked:
            if asked.backoff.countdown <= 0:
                asked.begin(Mode.PROBING)
        elif group.num_probes > 0:
            group.num_probes -= 1
            asked.begin(Mode.PROBING)

    @staticmethod
    def _num_nodes(asked: Asked, group: Group, limit: int, level: int) -> int:
        recent = asked.recent if asked.recent >= 1.0 else group.recent
        twice = max(math.ceil(2.0 * recent), MIN_NODES)
        if asked.mode is Mode.PROBING:
            return max(twice, PROBE_NODES)
        # While nothing was ever taken nobody knows; the patience bounds what that may cost.  Many
        # sequences share a step's nodes, and a tree for each of them is more than any step takes.
        return max(limit >> level, MIN_NODES) if recent == 0.0 else twice
