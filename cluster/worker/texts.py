"""The texts that the target runs.  Lost state of a text is recomputed from its token log."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from cluster.core import (
    EMPTY_TOKENS,
    EMPTY_TREE,
    FinishReason,
    SamplingParams,
    TokenArray,
    TokenTree,
    token_array,
)
from cluster.draft.committed_text import RequestState
from cluster.engine.work import Verdict
from cluster.plan.in_flight import PLAIN, InFlight
from cluster.plan.roster import lot_of
from cluster.plan.texts import MAX_DRAFTERS, SourceBits, Text
from cluster.requests.fields import NO_LAWS, PROFILE_TENANT, DraftStep, Laws, PlainWhy
from cluster.rpc.messages import Open, StepReport, TextName, TextVerdict
from cluster.spec.acceptance import group_of
from cluster.spec.token_log import TokenLog
from cluster.worker.mailbox import TargetStream

# A scoring step has logits of the whole vocabulary for each row: for a large vocabulary, 256 rows
# take 160 MB.
_MAX_SCORED_ROWS = 256


class TargetText(Text):
    """One text of the target, for its control loop, its verifier and the drafters inside it.

    Engine thread only.  id, name: its names inside the worker and at its coordinator.  stream: that
    coordinator's; a text that only measures has none.  opened: as it came.  as_request: as it is
    told to drafters.  in_flight: the nodes that the current step verifies; None = the text is not
    in a step.  laws: of these nodes.  held_len: the tokens that the engine holds of it; the
    verifier notes them.  suspect: a step with it raised; it runs alone and without drafts until
    such a step succeeds.  chosen_at: when the step began for which the nodes in flight were chosen;
    None = it was not decoding then.  preparation: the work that comes before its first step, None =
    there is none.
    """

    stream: TargetStream

    def __init__(self, text_id: str, opened: Open) -> None:
        params = opened.params
        group = group_of(params, opened.task, opened.adapter)
        super().__init__(text_id, group, TokenLog(opened.token_ids))
        self.is_coupled = params.is_coupled
        self.lot = lot_of(opened.request_id)
        self.opened = opened
        self.name = TextName(opened.request_id, opened.generation)
        self.params = params
        self.as_request = RequestState(
            opened.generation,
            opened.prompt_len,
            opened.task,
            params,
            self.tokens,
            tenant=opened.tenant,
            request_id=text_id,
        )
        self.names = opened.drafters[:MAX_DRAFTERS]
        self.latency_class = opened.latency_class
        self.in_flight: InFlight | None = None
        self.laws: Laws = NO_LAWS
        self.held_len = 0
        self.suspect = False
        self.preparation: Future[Any] | None = None
        self.chosen_at: float | None = None
        self.answered_at = 0.0  # when the last step began that had a verdict for it
        self.num_gained = 0  # plain steps that the tokens of the last verdict would have taken
        self.end: FinishReason | None = None  # by the last verdict; None = it goes on
        self.num_cached: int | None = None
        self.forced = token_array(params.forced_ids)
        # The output is given, and only its log-probabilities are requested.
        self.is_scored = len(self.forced) > 0
        # A given output is scored to its end, so none of its tokens stops the text.
        self._stop_ids = frozenset(() if self.is_scored else params.stop_token_ids)

    @property
    def is_ready(self) -> bool:
        """True if it may join the next step."""
        is_prepared = self.preparation is None or self.preparation.done()
        return self.in_flight is None and is_prepared and not self.stream.is_parked

    @property
    def is_decoding(self) -> bool:
        """True if the engine holds all tokens but the last, so that a tree may follow."""
        is_drawn = not self.is_scored and self.params.beams is None
        return is_drawn and self.held_len == len(self.tokens) - 1 and not self.suspect

    @property
    def remaining(self) -> int:
        """The most tokens that the text may still get."""
        return self.opened.max_len - len(self.tokens)

    @property
    def output_len(self) -> int:
        """Output tokens so far: the output position of the next one."""
        return len(self.tokens) - self.opened.prompt_len

    def num_wanted(self, resident: str) -> int:
        """Return the number of nodes that it wants of a resident after the last verdict."""
        # No draft can be of use where only one token may follow.
        is_asked = self.asks(resident) and not self.is_scored and self.remaining > 1
        return min(self.ask.num_nodes, self.cap) if is_asked else 0

    def forced_tree(self, max_rows: int) -> TokenTree:
        """Return the next tokens of a given output as a chain, which a step accepts completely;
        for other texts the empty tree.

        max_rows: as for a chunk of a prompt, only a share of a step.
        """
        if not self.is_scored or self.suspect:
            return EMPTY_TREE
        most = max(min(max_rows, _MAX_SCORED_ROWS), 1)
        start = self.output_len
        # The last token needs no node: the target emits it after the others.
        return TokenTree.chain(self.forced[start : min(start + most, len(self.forced) - 1)])

    def ending(self, token_ids: TokenArray) -> tuple[int, FinishReason | None]:
        """Return how many of a step's tokens belong to the text, and why it ends; None = it goes
        on.

        Its stop ids end it once it has min_tokens, and are not part of it."""
        for index, token in enumerate(token_ids[: self.remaining].tolist()):
            if token in self._stop_ids and self.output_len + index >= self.params.min_tokens:
                return index, FinishReason.STOP
        if len(token_ids) >= self.remaining:
            return self.remaining, FinishReason.LENGTH
        return len(token_ids), None

    def take(self, verdict: Verdict, why: PlainWhy, report: StepReport) -> TextVerdict:
        """Take in a step's answer.  Returns the verdict for the coordinator.

        why: the reason if no nodes were chosen."""
        in_flight, self.in_flight = self.in_flight or PLAIN, None
        if self.suspect:
            why = PlainWhy.FAULT
        elif not self.cap:
            why = PlainWhy.SWITCHBACK if self.is_plain else PlainWhy.SCHEDULE
        elif not why:
            why = PlainWhy.NOT_WORTH_IT if self.held else PlainWhy.NO_DRAFTS
        self.suspect = False
        self.num_steps += 1
        if self.num_cached is None:
            self.num_cached = min(verdict.num_cached, self.opened.prompt_len)
        # No draft is possible if only one token may follow, nor in the step of the prompt.
        could_draft = self.chosen_at is not None or why is PlainWhy.FAULT
        could_draft = could_draft and self.max_draft_tokens > 0 and self.remaining > 1
        self.end, num_kept = FinishReason.STOP, len(verdict.token_ids)
        if not verdict.beams:  # beams are whole texts, which nothing follows
            num_kept, self.end = self.ending(verdict.token_ids)
            self.tokens.append(verdict.token_ids[:num_kept])
        # A stop token is not part of the text, but plain decoding would have drawn it too.
        self.num_gained = num_kept + (self.end is FinishReason.STOP)
        # What was accepted behind the end is none of the text's.
        path, token_ids = verdict.path[:num_kept], verdict.token_ids[:num_kept]
        # The chain of a given output does not count as a draft.
        num_nodes = 0 if self.is_scored else len(in_flight.tree)
        sources, num_names = in_flight.sources, len(self.names)
        accepted, owned = (path, self.owners(sources.tolist())) if num_nodes else (EMPTY_TOKENS, [])
        why = PlainWhy.NONE if num_nodes or not could_draft else why
        step = None
        if self.opened.return_draft_trees:
            step = DraftStep(
                self.names,
                in_flight.tree.token_ids,
                in_flight.tree.parents,
                in_flight.survival,
                sources,
                path,
                token_ids[len(path) :],
                report.draft_time_s,
                report.step_time_s,
                report.num_sequences,
                why.name.lower() if why else "",
            )
        return TextVerdict(
            self.opened.request_id,
            self.opened.generation,
            verdict.context_len,
            token_ids,
            sources[accepted],
            tuple([owned[node] for node in accepted.tolist()]),
            num_nodes,
            _verified(sources, num_names) if num_nodes else (),
            tuple(map(owned.count, range(num_names))) if num_nodes else (),
            why,
            self.end,
            verdict.logprobs if verdict.beams else verdict.logprobs[:num_kept],
            self.num_cached,
            verdict.beams,
            step,
            verdict.redraws,
        )


def _verified(sources: SourceBits, num_names: int) -> tuple[int, ...]:
    """Count the nodes that each of the drafters had proposed."""
    bits = sources.tolist()
    return tuple(sum(each >> place & 1 for each in bits) for place in range(num_names))


def measured_text(
    name: str, token_ids: TokenArray, params: SamplingParams, drafters: Sequence[str] = ()
) -> TargetText:
    """Return a text that no coordinator has asked for, with as many drafts as anybody wants."""
    opened = Open(
        name,
        1,
        token_ids,
        0,
        len(token_ids),
        params,
        sys.maxsize,
        task="",
        tenant=PROFILE_TENANT,
        drafters=tuple(drafters),
    )
    text = TargetText(name, opened)
    text.cap = sys.maxsize
    return text
