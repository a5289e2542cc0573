"""One coordinator's stream at the target worker: its texts' names there, and the frames to send."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace

from cluster.messages import AdapterList, Load, StepFrame, StepReport, VerdictFrame
from cluster.models.engine_state import EngineState
from cluster.plan.texts import Text
from cluster.worker.mailbox import LinkEnd, ThreadMail

# The steps that a coordinator may leave unacknowledged before its texts are parked.  That is half a
# second of quick steps, so a coordinator that was only busy loses nothing.
_MAX_UNACKNOWLEDGED = 64
# The unacknowledged steps up to which it is told of others' steps, too: a busy machine parks the
# texts of one that counts for a moment, and its counters are to be right afterwards.
_MAX_UNREPORTED = 3 * _MAX_UNACKNOWLEDGED


class TargetStream(LinkEnd):
    """The state that one link has created at the worker; it is freed when the link ends.

    The event loop numbers its frames.  is_over: the link has ended.
    acknowledged: serial of the last frame that the coordinator has acknowledged.  heard: serial of
    the coordinator's last frame that the engine has applied.  counts: True if this stream gets the
    target's own metrics.
    """

    # Among them are those that tell every second that the target is there.
    what, max_unread = "frames", 4 * _MAX_UNACKNOWLEDGED

    def __init__(self, number: int) -> None:
        self._frames = deque[VerdictFrame]()
        super().__init__(number, self._frames)
        self.is_over = False
        self.serial = 0
        self.acknowledged = 0
        self.heard = 0
        self.counts = False
        self.is_plain = False  # its texts are to have no drafts at present

    @property
    def is_parked(self) -> bool:
        """True if its texts wait until the coordinator acknowledges frames again."""
        return self.serial - self.acknowledged > _MAX_UNACKNOWLEDGED

    @property
    def gets_reports(self) -> bool:
        """True if it counts steps, and is not too far behind to be told of those of other texts."""
        return self.counts and self.serial - self.acknowledged <= _MAX_UNREPORTED

    def post(self, frame: VerdictFrame) -> None:
        """Send `frame` with the next serial.  Does nothing once the loop is closed."""
        self._call_soon(self._put, frame)

    def take(self) -> Iterator[VerdictFrame]:
        """See `LinkEnd.take`."""
        while self._frames:
            yield self._frames.popleft()

    def _put(self, frame: VerdictFrame) -> None:
        self.serial += 1
        self._frames.append(replace(frame, serial=self.serial))
        self._wake.set()


Mailbox = ThreadMail[TargetStream, StepFrame]
# None means that the stream has ended.
Mail = tuple[TargetStream, StepFrame | None]


class TargetStreams:
    """The open streams.  The event loop opens and closes them.

    pages: of the KV cache, in use and in total; set by the engine thread.  engines: since a drafter
    inside was made anew, in place of those that the target described.
    """

    def __init__(self, max_texts: int, texts: Mapping[str, Text]) -> None:
        """max_texts: the most texts that the target runs at a time, 0 = any number.  texts: all."""
        self.pages = (0, 0)
        self._num_steps = 0
        self._texts = texts
        self._open: list[TargetStream] = []
        self._max_texts = max_texts
        self._num_opened = 0
        self._adapters: AdapterList | None = None
        self.engines: tuple[EngineState, ...] = ()

    def __iter__(self) -> Iterator[TargetStream]:
        return iter(self._open.copy())

    @property
    def seats(self) -> int:
        """The most texts that each stream may have, 0 = any number.  Each gets an equal share, so
        that a stream which asks for too much takes nothing from the others."""
        return -(-self._max_texts // max(len(self._open), 1))

    @property
    def load(self) -> Load:
        """The load that every coordinator is told."""
        texts = list(self._texts.values())  # atomic in Python, so the engine thread may go on
        num_waiting = sum(text.num_steps == 0 for text in texts)  # those without a verdict yet
        num_running = len(texts) - num_waiting
        return Load(self.seats, num_running, num_waiting, self._num_steps, *self.pages)

    def note_step(self, report: StepReport) -> None:
        """Note that a step is done; called by the engine thread."""
        self._num_steps += 1
        self.pages = report.pages_in_use, report.pages_total

    def open(self) -> TargetStream:
        self._num_opened += 1
        stream = TargetStream(self._num_opened)
        stream.counts = not self._open
        self._open.append(stream)
        self._tell_all()
        return stream

    def close(self, stream: TargetStream) -> None:
        stream.is_over = True
        self._open.remove(stream)
        if stream.counts and self._open:
            self._open[0].counts = True
        self._tell_all()

    def announce(self, adapters: AdapterList) -> None:
        """Tell every present and future coordinator which adapters new requests may use."""
        self._adapters = adapters
        self._tell_all()

    def _tell_all(self) -> None:
        """Tell every coordinator of adapters and engines, and of its share of the seats."""
        for stream in self._open:
            stream.post(VerdictFrame(adapters=self._adapters, load=self.load, engines=self.engines))
