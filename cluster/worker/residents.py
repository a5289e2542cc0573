"""The drafters inside the target worker: by turns with its steps, in its own thread.

After a step's verdicts have left, the residents hear what was committed and grow trees for the
sequences that want some, the quickest of them first, until all trees are complete or their time
is over.  They see no frames: the commits are made here, from items and verdicts.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce

from cluster.core import Completion, Verdict, VerifyItem
from cluster.draft.inside import WANTS_NOTHING, StepRows
from cluster.messages import DraftReport, ProposalFrame, StepReport
from cluster.worker.draft_names import (
    renamed_observation,
    renamed_proposal,
    renamed_refusal,
)
from cluster.worker.resident import ResidentDrafter, ResidentText
from cluster.worker.target_lease import TargetLease

log = logging.getLogger(__name__)

Answered = tuple[TargetLease, VerifyItem, Verdict]

# What drafting after a step may take, as a share of the step's own time.  A round of twice a plain
# one's time still pays where drafts double the tokens of a step, and hardly ever beyond that.  It
# bounds what a text that is being read costs those that are being written: a prompt of many chunks
# is read over as many rounds.
_STEP_SHARE = 1.0
# The residents of a model whose steps are shorter than this take about as long for themselves.
_LEAST_BOUND_S = 0.005


class Residents:
    """All of them.  Belongs to the engine thread; request ids are those inside the worker.

    kinds: look-ups and models, as `Ask.with_models` tells them apart; empty = there are none.
    """

    def __init__(
        self, drafters: Sequence[ResidentDrafter], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.names = tuple(drafter.name for drafter in drafters)
        self.look_ups = tuple(drafter.name for drafter in drafters if drafter.is_look_up)
        self.kinds = tuple(sorted({not drafter.is_look_up for drafter in drafters}))
        self.made_for = {drafter.name: drafter.made_for for drafter in drafters}
        self.engines = {each.name: each.engine for each in drafters if each.engine is not None}
        self._drafters = list(drafters)
        self._clock = clock
        self._texts: dict[str, ResidentText] = {}
        # What all of them together want of the target's steps.
        self.wants = reduce(operator.or_, (each.wants for each in drafters), WANTS_NOTHING)

    def draft(
        self,
        answered: Sequence[Answered],
        step: StepReport | None,
        rows: Sequence[StepRows] = (),
    ) -> list[tuple[TargetLease, DraftReport]]:
        """Draft for what a step has answered; returns what each link that asked is to be told.

        rows: what the step computed, for the drafters that read it."""
        if not self._drafters:
            return []
        started, bound_s = self._clock(), _bound_s(step)
        stalls: dict[str, float] = dict.fromkeys(self.names, 0.0)  # seconds, by the drafter
        if rows:
            for drafter in self._drafters:
                stalls[drafter.name] += drafter.read(rows, self.wants, bound_s)
        leases: dict[str, TargetLease] = {}
        texts: list[ResidentText] = []
        for lease, item, verdict in answered:
            text = self._committed(item, verdict)
            if text is not None:
                texts.append(text)
            if item.draft_nodes:
                leases[item.request_id] = lease
        frames = self._grow(texts, started, bound_s, stalls)
        # Who stalls rests, so that this is no part of what drafting takes.
        drafted_s = max(self._clock() - started - sum(stalls.values()), 0.0)
        stalled = tuple(name for name, stalled_s in stalls.items() if stalled_s)
        asked = [item for _, item, _ in answered if item.draft_nodes]
        reports: list[tuple[TargetLease, DraftReport]] = []
        for lease in dict.fromkeys(leases.values()):
            own = [item for item in asked if leases[item.request_id] is lease]
            report = DraftReport(
                tuple((name, _share(lease, frame)) for name, frame in frames),
                drafted_s,
                len(own),
                sum(item.draft_nodes for item in own),
                stalled,
                max(each.num_read for each in self._drafters),
            )
            reports.append((lease, report))
        return reports

    def idle_report(self) -> DraftReport | None:
        """What they hold, in a report of no drafts; None where there are none."""
        frames = tuple((drafter.name, drafter.idle_frame()) for drafter in self._drafters)
        return DraftReport(frames) if frames else None

    def begin_afresh(self, *, is_warm: bool) -> None:
        """Forget how they fared so far: nobody was served.  is_warm: except for their stalls."""
        for drafter in self._drafters:
            drafter.begin_afresh(is_warm=is_warm)

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these requests; unknown ones are no error."""
        known = [each for each in request_ids if self._texts.pop(each, None) is not None]
        if known:
            for drafter in self._drafters:
                drafter.release(known)

    def _grow(
        self,
        texts: Sequence[ResidentText],
        started: float,
        bound_s: float,
        stalls: dict[str, float],
    ) -> list[tuple[str, ProposalFrame]]:
        frames: list[tuple[str, ProposalFrame]] = []
        # Each gets one turn at least; the quick ones are not kept waiting by the others.
        for drafter in sorted(self._drafters, key=lambda each: each.mean_s) if texts else ():
            try:
                frame, stalled_s = drafter.draft(texts, bound_s, started + bound_s)
            except Exception:  # a defect of ours: the drafter itself is contained
                log.exception("resident drafting failed name=%s", drafter.name)
                continue
            if frame is not None:
                frames.append((drafter.name, frame))
            stalls[drafter.name] += stalled_s
        return frames

    def _committed(self, item: VerifyItem, verdict: Verdict) -> ResidentText | None:
        """The text after the verdict; None where nobody drafts for it, or its beginning is lost."""
        text = self._texts.get(item.request_id)
        if item.base_len == 0 and item.params is not None:
            if not item.residents:
                return None
            if text is None or text.generation != item.generation:
                text = ResidentText(
                    item.request_id, item.generation, item.prompt_len, item.params, item.task,
                    item.tenant, frozenset(item.residents),
                )  # fmt: skip
                self._texts[item.request_id] = text
        if text is None:
            return None
        tokens = text.tokens
        if (
            text.generation != item.generation
            or item.base_len > len(tokens)
            or tokens.hash_at(item.base_len) != item.prefix_hash
        ):
            self.release([item.request_id])
            return None
        tokens.truncate(item.base_len)
        tokens.append(item.delta)
        first = len(tokens) - text.prompt_len
        tokens.append(verdict.token_ids)
        text.draft_nodes, text.only_look_ups = item.draft_nodes, item.only_look_ups
        num_output = len(tokens) - text.prompt_len
        text.is_over = num_output + 1 >= text.params.max_tokens or any(
            token in text.params.stop_token_ids
            for token in verdict.token_ids[max(text.params.min_tokens - first, 0) :].tolist()
        )
        return text


def _bound_s(step: StepReport | None) -> float:
    """What all of them may take after a step."""
    return max(_STEP_SHARE * (step.step_time_s if step else 0.0), _LEAST_BOUND_S)


def _share(lease: TargetLease, frame: ProposalFrame) -> ProposalFrame:
    """What concerns one link, under the names that it knows."""
    return replace(
        frame,
        proposals=tuple(
            renamed_proposal(each, lease.outside(each.request_id))
            for each in frame.proposals
            if lease.owns(each.request_id)
        ),
        observations=tuple(
            renamed_observation(each, lease.outside(each.request_id))
            for each in frame.observations
            if lease.owns(each.request_id)
        ),
        refusals=tuple(
            renamed_refusal(each, lease.outside(each.request_id))
            for each in frame.refusals
            if lease.owns(each.request_id)
        ),
        completions=tuple(
            Completion(lease.outside(each.request_id), each.generation, each.base_len)
            for each in frame.completions
            if lease.owns(each.request_id)
        ),
    )
