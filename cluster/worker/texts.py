"""The texts that the target runs.  Lost state of a text is recomputed from its token log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from cluster.core import (
    EMPTY_TREE,
    FinishReason,
    TokenArray,
    TokenTree,
    Verdict,
    token_array,
)
from cluster.errors import CapacityError, ProtocolError
from cluster.messages import Open, TextName, TextVerdict
from cluster.plan.in_flight import PLAIN, InFlight
from cluster.plan.roster import lot_of
from cluster.plan.texts import MAX_DRAFTERS, NO_SOURCES, SourceBits, Text
from cluster.requests.plain_why import PlainWhy
from cluster.spec.acceptance import group_of
from cluster.spec.credit import counts, owners
from cluster.spec.ending import cut
from cluster.spec.params import check_params
from cluster.spec.token_log import TokenLog
from cluster.worker.target_stream import TargetStream
from cluster.worker.text_record import TextRecord

# A scoring step has logits of the whole vocabulary for each row: for a large vocabulary, 256 rows
# take 160 MB.
_MAX_SCORED_ROWS = 256
# The initial room of a text's log, in tokens.
_FIRST_ROOM = 1024


class TargetText(Text):
    """One text of the target.  Engine thread only.

    id: its name inside the worker.  in_flight: the nodes that the current step verifies; None = the
    text is not in a step.  record: the text as the verifier and residents see it, with the same
    log.  suspect: a step with it raised; it runs alone and without drafts until such a step
    succeeds.
    """

    def __init__(self, stream: TargetStream, opened: Open, residents: Sequence[str]) -> None:
        """residents: names of the drafters inside the target."""
        params = opened.params
        room = len(opened.token_ids) + min(params.max_tokens, _FIRST_ROOM)
        super().__init__(
            stream.inside(opened.request_id), group_of(params, opened.task, opened.adapter),
            TokenLog(opened.token_ids, room),
        )  # fmt: skip
        self.is_coupled = params.is_coupled
        self.lot = lot_of(opened.request_id)
        self.stream = stream
        self.opened = opened
        self.params = params
        self.names = opened.drafters[:MAX_DRAFTERS]
        self.latency_class = opened.latency_class
        self.in_flight: InFlight | None = None
        self.suspect = False
        self.was_decoding = False  # when the nodes in flight were chosen
        self.chosen_at = -math.inf  # when the step began for which they were
        self.answered_at = 0.0  # when the last step began that had a verdict for it
        self.num_misses = 0  # cache misses since the last verdict
        self.num_gained = 0  # plain steps that the tokens of the last verdict would have taken
        self.end: FinishReason | None = None  # by the last verdict; None = it goes on
        self.num_cached: int | None = None
        # A given output is scored to its end, so none of its tokens stops the text.
        self._forced = token_array(params.forced_ids)
        self._stop_ids = frozenset(() if self.is_scored else params.stop_token_ids)
        self.record = TextRecord(
            self.id, opened.generation, opened.prompt_len, params, opened.task, opened.tenant,
            frozenset(name for name in self.names if name in residents), self.tokens,
            opened.adapter, is_audit=opened.is_audit,
        )  # fmt: skip

    @property
    def is_scored(self) -> bool:
        """True if the output is given and only its log-probabilities are requested."""
        return len(self._forced) > 0

    @property
    def is_plain(self) -> bool:
        return self.stream.is_plain

    @property
    def is_decoding(self) -> bool:
        """True if the engine holds all tokens but the last, so that a tree may follow."""
        is_drawn = not self.is_scored and self.params.beams is None
        return is_drawn and self.record.held_len == len(self.tokens) - 1 and not self.suspect

    @property
    def remaining(self) -> int:
        """The most tokens that the text may still get."""
        return self.opened.max_len - len(self.tokens)

    def forced_tree(self, max_rows: int) -> TokenTree:
        """Return the next tokens of a given output as a chain, which a step accepts completely;
        for other texts the empty tree.

        max_rows: as for a chunk of a prompt, only a share of a step.
        """
        if not self.is_scored or self.suspect:
            return EMPTY_TREE
        most = max(min(max_rows, _MAX_SCORED_ROWS), 1)
        start = self.record.output_len
        # The last token needs no node: the target emits it after the others.
        return TokenTree.chain(self._forced[start : min(start + most, len(self._forced) - 1)])

    def take(self, verdict: Verdict, why: PlainWhy) -> TextVerdict:
        """Take in a step's answer.  Returns the verdict for the coordinator.

        why: the reason if no nodes were chosen."""
        in_flight, self.in_flight = self.in_flight or PLAIN, None
        if self.suspect:
            why = PlainWhy.FAULT
        elif not self.cap:
            why = PlainWhy.SWITCHBACK if self.is_plain else PlainWhy.SCHEDULE
        elif not why:
            why = PlainWhy.NOT_WORTH_IT if self.held else PlainWhy.NO_DRAFTS
        self.suspect, self.num_misses = False, 0
        self.num_steps += 1
        if self.num_cached is None:
            self.num_cached = min(verdict.num_cached, self.opened.prompt_len)
        # No draft is possible if only one token may follow, nor in the step of the prompt.
        could_draft = self.was_decoding or why is PlainWhy.FAULT
        could_draft = could_draft and self.max_draft_tokens > 0 and self.remaining > 1
        self.end, num_kept = FinishReason.STOP, len(verdict.token_ids)
        if not verdict.beams:  # beams are whole texts, which nothing follows
            num_kept, self.end = self._append(verdict.token_ids)
        # A stop token is not part of the text, but plain decoding would have drawn it too.
        self.num_gained = num_kept + (self.end is FinishReason.STOP)
        # What was accepted behind the end is none of the text's.
        path = verdict.path[:num_kept]
        # The chain of a given output does not count as a draft.
        num_nodes = 0 if self.is_scored else len(in_flight.tree)
        sources, num_names = in_flight.sources, len(self.names)
        owned = owners(sources.tolist(), self.by_weight()) if num_nodes else []
        return TextVerdict(
            self.opened.request_id, self.opened.generation, verdict.context_len,
            verdict.token_ids[:num_kept],
            sources[path] if len(path) and num_nodes else NO_SOURCES,
            tuple([owned[node] for node in path.tolist()]) if num_nodes else (),
            num_nodes,
            _verified(sources, num_names) if num_nodes else (),
            counts(owned, num_names) if num_nodes else (),
            PlainWhy.NONE if num_nodes or not could_draft else why,
            self.end,
            verdict.logprobs if verdict.beams else verdict.logprobs[:num_kept],
            self.num_cached,
            verdict.beams, redraws=verdict.redraws,
        )  # fmt: skip

    def _append(self, token_ids: TokenArray) -> tuple[int, FinishReason | None]:
        """Append the tokens of a step; returns how many belong to the text, and why it ends."""
        num_kept, reason = cut(
            token_ids, self.record.output_len, self.remaining, self._stop_ids,
            self.params.min_tokens,
        )  # fmt: skip
        self.tokens.append(token_ids[:num_kept])
        self.record.is_over = reason is not None or self.remaining <= 1
        return num_kept, reason


def _verified(sources: SourceBits, num_names: int) -> tuple[int, ...]:
    """Count the nodes that each of the drafters had proposed."""
    bits = sources.tolist()
    return tuple(sum(each >> place & 1 for each in bits) for place in range(num_names))


class TextTable(dict[str, TargetText]):
    """All texts, by their names inside the worker.  Engine thread only, but for `names`."""

    def __init__(self, residents: Sequence[str], vocab_size: int, max_draft_tokens: int) -> None:
        super().__init__()
        self._residents = residents
        self.vocab_size = vocab_size
        self.max_draft_tokens = max_draft_tokens

    def of(self, stream: TargetStream) -> list[TargetText]:
        """Return the texts of one coordinator."""
        return [text for text in self.values() if text.stream is stream]

    def names(self, stream: TargetStream) -> tuple[TextName, ...]:
        """Return the coordinator's own names of its texts; may be called from any thread."""
        # The copy is atomic in Python, so the engine thread may go on meanwhile.
        return tuple(
            TextName(text.opened.request_id, text.opened.generation)
            for text in self.copy().values()
            if text.stream is stream
        )

    def add(self, stream: TargetStream, opened: Open, seats: int) -> TargetText | None:
        """Add a text; returns None if it is here already or a newer owner has it.

        seats: the most texts of this coordinator, 0 = any number.  Raises ProtocolError or
        RequestError for an invalid text, and CapacityError if the coordinator may have no more.
        """
        known = self.get(stream.inside(opened.request_id))
        if known is not None and known.opened.generation >= opened.generation:
            return None
        self._check(opened)
        if known is None and seats and len(self.of(stream)) >= seats:
            raise CapacityError(
                f"{seats} texts run here for this coordinator; ask again when one has ended",
                retry_after_s=1.0,
            )
        text = TargetText(stream, opened, self._residents)
        if text.tokens.hash_at(len(text.tokens)) != opened.prefix_hash:
            raise ProtocolError("prefix_hash is not that of token_ids; send the text again")
        text.max_draft_tokens = min(max(opened.max_draft_tokens, 0), self.max_draft_tokens)
        self[text.id] = text
        return text

    def _check(self, opened: Open) -> None:
        """Raise ProtocolError or RequestError for a text that makes no sense."""
        tokens = opened.token_ids
        if not 1 <= opened.prompt_len <= len(tokens):
            raise ProtocolError(
                f"prompt_len is {opened.prompt_len} and there are {len(tokens)} tokens; "
                "send the whole prompt"
            )
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ProtocolError(
                f"a token is outside the target's vocabulary 0..{self.vocab_size - 1}"
            )
        if opened.max_len <= len(tokens):
            raise ProtocolError(
                f"max_len is {opened.max_len} and there are {len(tokens)} tokens; the text is over"
            )
        # An audit is given the text that was written under its grammar.
        params = replace(opened.params, grammar=None) if opened.is_audit else opened.params
        check_params(params, self.vocab_size)
        if len(set(opened.drafters)) != len(opened.drafters):
            raise ProtocolError("drafters names one twice")
