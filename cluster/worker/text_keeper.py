"""Opens and ends the target's texts by the mail that arrives, and frees their state."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from cluster import metrics
from cluster.errors import DrafthouseError, RequestError, WorkerError
from cluster.messages import Open, PoolTree, Refusal, TextName, VerdictFrame
from cluster.metrics.recorder import Recorder
from cluster.plan.controller import Controller
from cluster.plan.fence import Fence
from cluster.plan.texts import POOL, HeldTree
from cluster.spec.tree_check import problem_of_tree
from cluster.worker.residents import Residents
from cluster.worker.target_stream import Mail, TargetStream, TargetStreams
from cluster.worker.texts import TargetText, TextTable
from cluster.worker.verifier import Verifier

log = logging.getLogger(__name__)

# If the engine forgets a text so often without a verdict in between, the text is given up.
_MAX_MISSES_IN_A_ROW = 16


class TextKeeper:
    """Belongs to the engine thread."""

    def __init__(
        self,
        verifier: Verifier,
        residents: Residents,
        controller: Controller,
        streams: TargetStreams,
        texts: TextTable,
        recorder: Recorder,
        fence: Fence,
    ) -> None:
        self._verifier = verifier
        self._residents = residents
        self._controller = controller
        self._streams = streams
        self._texts = texts
        self._recorder = recorder
        self._scoring = fence.section("scores")
        self._roster = controller.scores.roster
        self._num_changes = self._roster.num_changes  # of the roster, as the texts follow it
        self._convicted: set[str] = set()  # names that raised alone; they begin as suspects

    def apply(self, mail: Sequence[Mail]) -> None:
        """Apply the mail, and let others draft if the roster has changed since the last time."""
        for stream, frame in mail:
            if frame is None:
                self._end(stream)
                continue
            if stream.is_over:
                continue
            for name in frame.cancels:
                text = self._texts.get(stream.inside(name.request_id))
                if text is not None and text.opened.generation <= name.generation:
                    self.drop(text)
            for opened in frame.opens:
                self._open(stream, opened)
            for tree in frame.trees:
                self._hold(stream, tree)
            if frame.heartbeat is not None:
                self._forget_unnamed(stream, frame.heartbeat.texts)
                stream.is_plain = frame.heartbeat.is_plain
            # Last, because a frame counts as heard only once its texts are here.
            stream.heard = max(stream.heard, frame.serial)
        self._follow_changes()

    def _end(self, stream: TargetStream) -> None:
        for text in self._texts.of(stream):
            self.drop(text)
        self._convicted = {name for name in self._convicted if not name.startswith(stream.prefix)}

    def _forget_unnamed(self, stream: TargetStream, names: Sequence[TextName]) -> None:
        """Drop texts whose cancel was lost."""
        named = set(names)
        for text in self._texts.of(stream):
            if TextName(text.opened.request_id, text.opened.generation) not in named:
                self.drop(text)

    def _open(self, stream: TargetStream, opened: Open) -> None:
        name = stream.inside(opened.request_id)
        former = self._texts.get(name)
        try:
            text = self._texts.add(stream, opened, self._streams.seats)
        except DrafthouseError as error:
            self._refuse(stream, opened, error)
            return
        if text is None:
            return
        if former is not None:
            self._verifier.release([name])
            self._residents.release([name])
        text.suspect = name in self._convicted
        self._follow_roster(text)

    def _hold(self, stream: TargetStream, mail: PoolTree) -> None:
        """Keep the newest of a text's pool trees; one that does not fit is dropped."""
        text = self._texts.get(stream.inside(mail.request_id))
        if text is None or text.opened.generation != mail.generation:
            return
        tokens, former = text.tokens, text.held.get(POOL)
        if (
            not 0 < mail.base_len <= len(tokens)
            or tokens.hash_at(mail.base_len) != mail.prefix_hash
            or (former is not None and former.proposed_len > mail.base_len)
            or not _is_sound(mail, len(text.names), self._texts.vocab_size)
        ):
            return
        text.held[POOL] = HeldTree(
            mail.base_len, mail.base_len, mail.tree, mail.survival, sources=mail.sources
        )
        text.weights.update(
            (name, weight) for name, weight in zip(text.names, mail.weights, strict=False) if weight
        )

    def _follow_changes(self) -> None:
        if self._num_changes != self._roster.num_changes:
            self._num_changes = self._roster.num_changes
            for text in self._texts.values():
                self._follow_roster(text)
                self._roster.drop_trees(text)

    def _follow_roster(self, text: TargetText) -> None:
        self._roster.assign(text)
        asked = frozenset(self._residents.names).intersection(text.names)
        text.record.residents = asked - text.resting

    def drop(self, text: TargetText) -> None:
        """Free all state of a text."""
        self._texts.pop(text.id, None)
        self._verifier.release([text.id])
        self._residents.release([text.id])
        with self._scoring:
            self._controller.score([text], ends=True)

    def end(self, text: TargetText, error: DrafthouseError) -> None:
        """Stop running a text, and tell the coordinator why."""
        self.drop(text)
        self._refuse(text.stream, text.opened, error)

    def convict(self, text: TargetText, error: DrafthouseError) -> None:
        """End a text that raised in a step of its own; its next attempts begin as suspects."""
        self._convicted.add(text.id)
        self.end(text, error)

    def take_misses(self, names: Iterable[str]) -> None:
        """Take in that the engine has lost tokens of these texts; their logs have them."""
        for name in names:
            text = self._texts[name]
            self._recorder.add(metrics.CACHE_MISSES)
            text.in_flight = None
            text.num_misses += 1
            if text.num_misses > _MAX_MISSES_IN_A_ROW:
                self.end(text, WorkerError("the engine cannot keep the text's context"))

    def take_refusals(self, refused: Mapping[str, DrafthouseError]) -> None:
        """Take in that the engine cannot serve these texts as they are."""
        for name, error in refused.items():
            text = self._texts[name]
            in_flight, text.in_flight = text.in_flight, None
            has_drafts = in_flight is not None and len(in_flight.tree) > 0 and not text.is_scored
            if isinstance(error, RequestError) and has_drafts:
                # Perhaps only its drafts needed too much (pages, rows), and they must not end it.
                log.warning("drafts refused text=%s code=%s: %s", name, error.code, error.message)
                text.max_draft_tokens = 0
            else:
                self.end(text, error)

    def _refuse(self, stream: TargetStream, opened: Open, error: DrafthouseError) -> None:
        log.warning(
            "text refused request=%s generation=%s code=%s: %s",
            opened.request_id, opened.generation, error.code, error.message,
        )  # fmt: skip
        refusal = Refusal(opened.request_id, opened.generation, error.code, error.message)
        stream.post(VerdictFrame(refusals=(refusal,)))


def _is_sound(mail: PoolTree, num_names: int, vocab_size: int) -> bool:
    """True if the tree is well formed and each node has sources among the text's drafters."""
    known = (1 << num_names) - 1
    return (
        len(mail.sources) == len(mail.tree)
        and bool(((mail.sources > 0) & (mail.sources <= known)).all())
        and not problem_of_tree(mail.tree, mail.survival, vocab_size)
    )
