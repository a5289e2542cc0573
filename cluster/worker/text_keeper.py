"""Opens and ends the target's texts by the mail that arrives, and frees their state.

Where a step raises, its texts run again one by one, and one that raises alone ends.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from cluster.errors import CapacityError, DrafthouseError, ProtocolError, RequestError, WorkerError
from cluster.metrics.recorder import TARGET, Recorder
from cluster.plan.controller import Controller
from cluster.plan.fence import Fence
from cluster.plan.texts import POOL
from cluster.rpc.messages import (
    Open,
    PoolTree,
    Refusal,
    StepFrame,
    VerdictFrame,
    WorkerDescription,
)
from cluster.spec.native import trees as native
from cluster.spec.params import check_params
from cluster.spec.tree_check import are_sound
from cluster.worker.mailbox import TargetStream, TargetStreams, ThreadMail
from cluster.worker.residents import Residents
from cluster.worker.texts import TargetText
from cluster.worker.verifier import Verifier

log = logging.getLogger(__name__)

# If so many requests raise alone with no good step in between, the engine itself is broken.
_MAX_RAISED_ALONE = 3


class TextKeeper(dict[str, TargetText]):
    """All texts, by their names inside the worker.  Engine thread only, but for `of`.

    broken: the error after which the engine cannot be used any more, None = it can.
    """

    def __init__(
        self,
        verifier: Verifier,
        residents: Residents,
        controller: Controller,
        description: WorkerDescription,
    ) -> None:
        super().__init__()
        self.mailbox = ThreadMail()
        self.recorder = Recorder(description.worker_id, TARGET)
        self.scoring = Fence(self.recorder, "scores")
        self.streams = TargetStreams(description.max_running_sequences, self)
        self.description = description
        self.broken: WorkerError | None = None
        self.verifier, self.residents, self.controller = verifier, residents, controller
        self._convicted: set[str] = set()  # names that raised alone; they begin as suspects
        self.raised_alone: set[str] = set()  # names of texts, since the last good step

    def of(self, stream: TargetStream) -> list[TargetText]:
        """Return the texts of one coordinator; may be called from any thread."""
        # The copy is atomic in Python, so the engine thread may go on meanwhile.
        return [text for text in self.copy().values() if text.stream is stream]

    def next_batch(self, max_rows: int) -> list[TargetText]:
        """Return the texts that join the step: all that are ready, or one suspect alone, once
        nothing is in flight."""
        ready = [text for text in self.values() if text.is_ready]
        suspects = [text for text in ready if text.suspect]
        in_flight = [text for text in self.values() if text.in_flight is not None]
        if suspects or any(text.suspect for text in in_flight):
            return [] if in_flight else suspects[:1]
        if len(ready) > max_rows:
            # If not all fit, the group of the text that has waited longest goes first.
            first = min(ready, key=lambda text: text.answered_at).group
            ready.sort(key=lambda text: (text.group != first, text.answered_at))
        return ready[:max_rows]

    def apply(self, stream: TargetStream, frame: StepFrame) -> None:
        """Apply a coordinator's frame."""
        for name in frame.cancels:
            text = self.get(stream.inside(name.request_id))
            if text is not None and text.opened.generation <= name.generation:
                self.drop(text)
        for opened in frame.opens:
            self._open(stream, opened)
        for tree in self._sound(frame.trees):
            self._hold(stream, tree)
        if frame.heartbeat is not None:
            named = set(frame.heartbeat.texts)
            stream.is_plain = frame.heartbeat.is_plain
            for text in self.of(stream):
                text.is_plain = stream.is_plain
                if text.name not in named:  # its cancel was lost
                    self.drop(text)
        # Last, because a frame counts as heard only once its texts are here.
        stream.heard = max(stream.heard, frame.serial)

    def free(self, stream: TargetStream) -> None:
        """Drop what a link that has ended leaves behind."""
        for text in self.of(stream):
            self.drop(text)
        self._convicted = {name for name in self._convicted if not name.startswith(stream.prefix)}

    def _open(self, stream: TargetStream, opened: Open) -> None:
        """Run a text, unless it is here already or a newer owner has it."""
        name, seats = stream.inside(opened.request_id), self.streams.seats
        former = self.get(name)
        if former is not None and former.opened.generation >= opened.generation:
            return
        try:
            text = self._checked(name, opened)
            if former is None and seats and len(self.of(stream)) >= seats:
                raise CapacityError(
                    f"{seats} texts run here for this coordinator; ask again when one has ended"
                )
            text.preparation = work = self.verifier.prepare(text.params)
        except DrafthouseError as error:
            self._refuse(stream, opened, error)
            return
        if former is not None:
            self._free(former)
        text.stream, text.is_plain, self[name] = stream, stream.is_plain, text
        if work is not None:  # a thread that waits is told when the text is ready
            work.add_done_callback(lambda _: self.mailbox.put(lambda: None))
        text.max_draft_tokens = max(
            min(opened.max_draft_tokens, self.controller.config.max_draft_tokens), 0
        )
        text.suspect = name in self._convicted
        self.controller.scores.roster.assign(text)

    def _checked(self, name: str, opened: Open) -> TargetText:
        """Return a new text; raises ProtocolError or RequestError where it makes no sense."""
        tokens = opened.token_ids
        if not 1 <= opened.prompt_len <= len(tokens):
            raise ProtocolError(
                f"prompt_len is {opened.prompt_len} and there are {len(tokens)} tokens; "
                "send the whole prompt"
            )
        if tokens.min() < 0 or tokens.max() >= self.description.vocab_size:
            raise ProtocolError(
                f"a token is outside the target's vocabulary 0..{self.description.vocab_size - 1}"
            )
        if opened.max_len <= len(tokens):
            raise ProtocolError(
                f"max_len is {opened.max_len} and there are {len(tokens)} tokens; the text is over"
            )
        # An audit is given the text that was written under its grammar.
        params = replace(opened.params, grammar=None) if opened.is_audit else opened.params
        check_params(params, self.description.vocab_size)
        if len(set(opened.drafters)) != len(opened.drafters):
            raise ProtocolError("drafters names one twice")
        text = TargetText(name, opened)
        if text.tokens.hash_at(len(tokens)) != opened.prefix_hash:
            raise ProtocolError("prefix_hash is not that of token_ids; send the text again")
        return text

    def _sound(self, trees: Sequence[PoolTree]) -> Sequence[PoolTree]:
        """Return the trees that are well formed."""

        def are_all(found: Sequence[PoolTree]) -> bool:
            survivals = [each.survival for each in found]
            return are_sound([each.tree for each in found], survivals, self.description.vocab_size)

        if not native.is_available():  # they could not be merged with those of residents
            return ()
        return trees if are_all(trees) else [each for each in trees if are_all([each])]

    def _hold(self, stream: TargetStream, mail: PoolTree) -> None:
        """Keep the newest of a text's pool trees; one that does not fit is dropped."""
        text = self.get(stream.inside(mail.request_id))
        if text is None or text.opened.generation != mail.generation:
            return
        tokens, known = text.tokens, (1 << len(text.names)) - 1  # each node is of one of these
        if (
            not 0 < mail.base_len <= len(tokens)
            or tokens.hash_at(mail.base_len) != mail.prefix_hash
            or len(mail.sources) != len(mail.tree)
            or not ((mail.sources > 0) & (mail.sources <= known)).all()
        ):
            return
        held = text.keep_newest(POOL, mail.base_len, mail.tree, mail.survival)
        if held is None:
            return
        held.sources = mail.sources
        text.weights.update(
            (name, weight) for name, weight in zip(text.names, mail.weights, strict=False) if weight
        )

    def drop(self, text: TargetText) -> None:
        """Free all state of a text."""
        self.pop(text.id, None)
        self._free(text)
        with self.scoring:
            self.controller.scores.score([text], ends=True)

    def _free(self, text: TargetText) -> None:
        self.verifier.release([text.id])
        self.residents.release([text.id])

    def end(self, text: TargetText, error: DrafthouseError) -> None:
        """Stop running a text, and tell the coordinator why."""
        self.drop(text)
        self._refuse(text.stream, text.opened, error)

    def take_refusals(self, refused: Mapping[str, DrafthouseError]) -> None:
        """Take in that the engine cannot serve these texts as they are."""
        for name, error in refused.items():
            text = self[name]
            in_flight, text.in_flight = text.in_flight, None
            has_drafts = in_flight is not None and len(in_flight.tree) > 0 and not text.is_scored
            if isinstance(error, RequestError) and has_drafts:
                # Perhaps only its drafts needed too much (pages, rows), and they must not end it.
                log.warning("drafts refused text=%s code=%s: %s", name, error.code, error.message)
                text.max_draft_tokens = 0
            else:
                self.end(text, error)

    def contain(self, error: Exception) -> None:
        """Handle a step that raised: its texts run again one by one, without drafts, and a text
        that raises alone is refused.

        The engine is broken if several texts raise alone with no good step in between, or if the
        error is a WorkerError (its device or a rank is lost) or torch's of a device, which raises
        wherever that is waited for.
        """
        kind = type(error).__name__
        failed = [text for text in self.values() if text.in_flight is not None]
        guilty = failed if len(failed) == 1 else []
        self.raised_alone |= {text.id for text in guilty}
        is_lost = isinstance(error, WorkerError | torch.AcceleratorError)
        if is_lost or len(self.raised_alone) >= _MAX_RAISED_ALONE:
            self.break_off(f"the target's engine is broken: {kind}")
            return
        # Their state is dropped, because the step may have left it inconsistent.
        self.verifier.release([text.id for text in failed])
        for text in failed:
            text.in_flight, text.suspect = None, True
            text.held.clear()
        for text in guilty:
            self._convicted.add(text.id)
            self.end(text, WorkerError(f"the target failed on this step ({kind}); try again"))

    def break_off(self, message: str) -> None:
        """End every stream, because the engine cannot be used any more."""
        self.broken = WorkerError(message)
        for stream in self.streams:
            stream.finish()

    def _refuse(self, stream: TargetStream, opened: Open, error: DrafthouseError) -> None:
        told = opened.request_id, opened.generation, error.code, error.message
        log.warning("text refused request=%s generation=%s code=%s: %s", *told)
        stream.post(VerdictFrame(refusals=(Refusal(*told),)))
