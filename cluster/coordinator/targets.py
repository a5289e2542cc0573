"""One connected target: the texts it runs, what it must be told, and whether it has fallen silent.

How long a target may take for a step nobody knows: a prompt may be long, and the first step of a
shape may compile for a minute.  So a target says every second what it runs, and what counts is for
how long nothing is said:

    at all             the target has stopped, or cannot be reached: it is left
    of any progress    the target hangs in a step: it is left, after a much longer time, which
                       grows with what its steps have taken

A single text that got lost is not named any more, and is opened again.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

from cluster.config.schema import CoordinatorConfig
from cluster.coordinator.session import Session
from cluster.coordinator.workers import Worker
from cluster.rpc.link import Link
from cluster.rpc.messages import (
    MAX_UNACKNOWLEDGED,
    AdapterList,
    Heartbeat,
    Load,
    Open,
    PoolTree,
    StepFrame,
    TextName,
    VerdictFrame,
    WorkerDescription,
)

# What a target says of its control loop in status reports.
_OF_LOOP = ("scores", "loads", "rollouts")
_ANY_NUMBER = 2**16  # of seats, where a target has no limit
# A step that takes so many times as long as any of the last ones hangs: a chunk of a prompt takes
# some tens of times as long as a step without one, and those are among the last ones.
_STUCK_FACTOR = 10.0
# What is left of the longest time without progress with every progress, so that one long step, say
# the first of a shape, is forgotten after some hundreds.
_MEMORY = 0.99
# Pages that are remembered of one target: of a million tokens, in about 10 MB.
_MAX_PAGES = 65_536


class TargetSeat(Worker[StepFrame]):
    """A target replica as the coordinator sees it.

    load: how busy the target last said it was.  state: what it last said of its control loop.
    adapters: that it serves, None = it has not said yet.  page: its own metrics, if it tells
    them here.  received: serial of its last frame.
    """

    def __init__(
        self,
        target_id: str,
        description: WorkerDescription,
        link: Link[StepFrame, VerdictFrame],
        max_frame_tokens: int,
        page_len: int,
    ) -> None:
        """page_len: tokens of a page of its prefix cache."""
        super().__init__(target_id, description, link)
        self.sessions: dict[str, Session] = {}
        self._silent_s = self._stuck_s = 0.0  # with work: without a word, without progress
        self._longest_stuck_s = 0.0
        self.load = Load(seats=description.max_running_sequences)
        self._num_elsewhere = 0  # texts that it runs for other coordinators
        self.is_full = False  # it has refused a text since it last said how busy it is
        self.state: dict[str, Any] = {}
        self.adapters: AdapterList | None = None
        self.page = b""
        self.received = 0
        self._acknowledged = 0  # as it was last told
        self._serial = 0
        self._max_frame_tokens = max_frame_tokens
        self._unsent: dict[str, Session] = {}
        self._cancels: list[TextName] = []
        self._trees: dict[str, PoolTree] = {}
        self._is_beat_due = self._is_plain = False
        self._page_len = page_len
        # The pages that it has been given to compute, used last at the end.  A page is known by the
        # hash of everything up to its end and by whose text it is.  This is a guess: other
        # coordinators place texts too, and a target drops pages as it likes.
        self._given: OrderedDict[int, None] = OrderedDict()

    @property
    def max_seats(self) -> int:
        """Seats that the target has for all coordinators."""
        return self.description.max_running_sequences or _ANY_NUMBER

    @property
    def num_seats(self) -> int:
        """This coordinator's share of them."""
        return min(self.load.seats or _ANY_NUMBER, self.max_seats)

    @property
    def num_free(self) -> int:
        """Seats that no coordinator's text takes, as the target said and as was opened since."""
        return max(self.max_seats - self._num_elsewhere - len(self.sessions), 0)

    def has_room(self) -> bool:
        """True if this coordinator may have one more text there."""
        return not self.is_full and len(self.sessions) < self.num_seats

    def heard(self, frame: VerdictFrame) -> None:
        """A frame of the target has come, and what it says of texts is taken."""
        self._silent_s, load = 0.0, frame.load or self.load
        if frame.verdicts or frame.refusals or load.num_steps != self.load.num_steps:
            self._longest_stuck_s = max(_MEMORY * self._longest_stuck_s, self._stuck_s)
            self._stuck_s = 0.0
        if frame.load is not None:
            self.note_load(frame.load)
        self.page = frame.page or self.page
        self.received = max(self.received, frame.serial)
        if self._is_acknowledgement_due:
            self.wake()

    def why_leave(self, elapsed_s: float, settings: CoordinatorConfig) -> str:
        """Return why the target is to be left now, "" if it is not.

        elapsed_s: since this was asked last, in which its frames would have been heard."""
        if not self.sessions:
            elapsed_s = self._silent_s = self._stuck_s = 0.0
        self._silent_s += elapsed_s
        self._stuck_s += elapsed_s
        if self._silent_s >= settings.target_silence_s:
            return f"said nothing for {self._silent_s:.1f} s"
        if self._stuck_s >= max(settings.target_timeout_s, _STUCK_FACTOR * self._longest_stuck_s):
            return f"has been in one step for {self._stuck_s:.0f} s"
        return ""

    def note_load(self, load: Load) -> None:
        """The target has said how busy it is."""
        self.load, self.is_full = load, False
        self._num_elsewhere = max(load.num_running + load.num_waiting - len(self.sessions), 0)

    def open(self, session: Session) -> None:
        """Let the target run `session`, from its first token on."""
        session.target_id = self.id
        session.opened_serial, session.has_answered = 0, False
        self.sessions[session.id] = session
        self._unsent[session.id] = session
        self._trees.pop(session.id, None)
        self._remember(session)
        self.wake()

    def drop(self, session: Session) -> None:
        """Let the target end `session`; unknown ones are no error."""
        if session.id not in self.sessions:
            return
        self.ended(session)
        self._cancels.append(session.name)
        self.wake()

    def ended(self, session: Session) -> None:
        """The target has ended `session` by itself."""
        self.forget(session)
        self._remember(session)

    def forget(self, session: Session) -> None:
        """Neither tell nor hear anything more of `session`."""
        self.sessions.pop(session.id, None)
        self._unsent.pop(session.id, None)
        self._trees.pop(session.id, None)

    def num_held(self, session: Session) -> int:
        """Return how many tokens at the beginning of the text the target should hold."""
        count, most = 0, len(session.tokens) // self._page_len
        while count < most and self._page(session, count + 1) in self._given:
            count += 1
        return count * self._page_len

    def _remember(self, session: Session) -> None:
        """Note that the target computes the text as far as it goes."""
        # The first page last: so a page is forgotten only after all that continue it.
        for number in range(len(session.tokens) // self._page_len, 0, -1):
            page = self._page(session, number)
            self._given[page] = None
            self._given.move_to_end(page)
        while len(self._given) > min(self.load.pages_total or _MAX_PAGES, _MAX_PAGES):
            self._given.popitem(last=False)

    def _page(self, session: Session, num_pages: int) -> int:
        request = session.request
        end_hash = session.tokens.hash_at(num_pages * self._page_len)
        return hash((request.tenant, request.adapter, end_hash))

    def tell(self, tree: PoolTree) -> None:
        """Send what the pool guesses, unless something newer comes first."""
        if tree.request_id in self.sessions and tree.request_id not in self._unsent:
            self._trees[tree.request_id] = tree
            self.wake()

    @property
    def _is_acknowledgement_due(self) -> bool:
        return 4 * (self.received - self._acknowledged) >= MAX_UNACKNOWLEDGED

    def beat(self, *, is_plain: bool) -> None:
        """Tell the target which texts it is to have; twice a second or so.  is_plain: they are to
        have no drafts at present."""
        self._is_beat_due, self._is_plain = True, is_plain
        self.wake()

    def status(self) -> dict[str, object]:
        """A plain picture of the moment, for status reports."""
        return {
            "id": self.id,
            "sessions": len(self.sessions),
            "load": dataclasses.asdict(self.load),
            **{name: self.state[name] for name in _OF_LOOP if name in self.state},
        }

    def resident_states(self) -> list[dict[str, Any]]:
        """The drafters inside it, as the pool's are told of."""
        known, written_at = self.state.get("residents", {}), self.state.get("written_at", {})
        return [
            {
                "name": name,
                "id": self.id,
                "sessions": len(self.sessions),
                "breaker": known.get(name, "closed"),
                "written_at": written_at.get(name, 0.0),
            }
            for name in self.description.residents
        ]

    def next_frame(self) -> StepFrame | None:
        has_news = self._unsent or self._cancels or self._trees or self._is_beat_due
        if not (has_news or self._is_acknowledgement_due):
            return None
        self._serial += 1
        cancels, trees = tuple(self._cancels), tuple(self._trees.values())
        self._cancels.clear()
        self._trees.clear()
        opens = self._next_opens()
        heartbeat = None
        if self._is_beat_due and not self._unsent:
            names = tuple(each.name for each in self.sessions.values())
            heartbeat, self._is_beat_due = Heartbeat(names, self.received, self._is_plain), False
        self._acknowledged = self.received
        return StepFrame(opens, cancels, trees, self._serial, self.received, heartbeat)

    def _next_opens(self) -> tuple[Open, ...]:
        opens: list[Open] = []
        room = self._max_frame_tokens
        for session in list(self._unsent.values()):
            if opens and len(session.tokens) > room:
                break
            room -= len(session.tokens)
            del self._unsent[session.id]
            session.opened_serial = self._serial
            opens.append(session.opened())
        return tuple(opens)
