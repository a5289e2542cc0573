"""Audits: a finished text is verified once more, to see that every token is what the target draws.

The whole text is given to a target, as one that is scored, with the parameters and the seed that it
was written by.  The target draws at every place, from rows that no draft, no cached page and no
batch of that time had a part in: the audit is a tenant of its own.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cluster import metrics
from cluster.coordinator.present import Ended, Present
from cluster.coordinator.sessions import SessionTable
from cluster.core import (
    EMPTY_TOKENS,
    FinishReason,
    Request,
    SpeculationOptions,
    TokenArray,
    TokenEvent,
)
from cluster.requests.fields import Redraw

log = logging.getLogger(__name__)

_MAX_CASES = 32
# A server without idle time is audited all the same.
_PATIENCE_S = 30.0
_MAX_FILES = 64


class Auditor:
    """Chooses finished texts, and has them verified one after the other."""

    def __init__(self, present: Present, table: SessionTable) -> None:
        self._present = present
        self._table = table
        self._due = 0.0  # texts that are to be chosen
        self._cases: deque[Ended] = deque()
        self._is_running = False

    def hear(self, ends: Sequence[Ended]) -> None:
        """Sessions have ended; their texts may be chosen."""
        share = self._present.config.coordinator.audit.share
        for each in ends:
            session = each.session
            is_drawn = session.is_drawn and session.request.params.is_coupled
            if not is_drawn or each.reason is FinishReason.ERROR or not session.num_output_tokens:
                continue
            self._due += share
            if self._due < 1.0:
                continue
            self._due -= 1.0
            if len(self._cases) >= _MAX_CASES:
                self._count("skipped")
                continue
            self._cases.append(each)

    def tick(self) -> None:
        """Begin with the next text, if there is time for it."""
        table = self._table
        if self._is_running or not self._cases or table.num_waiting or not self._present.seats:
            return
        if table.num_running and self._present.clock() - self._cases[0].at < _PATIENCE_S:
            return
        case = self._cases.popleft()
        self._is_running = True

        def deliver(event: TokenEvent) -> None:
            if event.finish_reason is None:
                return
            self._is_running = False
            is_done = event.position + len(event.token_ids) == case.session.num_output_tokens
            self._conclude(case, session.redraws if is_done else None)
            self.tick()

        session = table.audit(_request(case), deliver, case.target_id)

    def _conclude(self, case: Ended, redraws: list[Redraw] | None) -> None:
        """redraws: None = it came to no end."""
        if not redraws:
            self._count("failed" if redraws is None else "equal")
            return
        config, output_ids = self._present.config, _output_of(case)
        settings = config.coordinator.audit
        margin = 0.0 if config.target.engine.reproducible else settings.tie_margin
        if all(each.gap <= margin for each in redraws):
            self._count("near_tie")
            return
        self._count("mismatch")
        worst = max(redraws, key=lambda each: each.gap)
        log.error(
            "audit: the text of request=%s target=%s is not what is drawn now: place=%d token=%d "
            "drawn=%d gap=%.4f places=%d of %d",
            case.session.request.id,
            case.target_id,
            worst.position,
            output_ids[worst.position],
            worst.token_id,
            worst.gap,
            len(redraws),
            len(output_ids),
        )
        if settings.folder:
            _keep(Path(settings.folder), case, redraws)

    def _count(self, outcome: str) -> None:
        self._present.recorder.add(metrics.AUDITED, outcome=outcome)


def _output_of(case: Ended) -> TokenArray:
    return case.session.tokens.since(case.session.prompt_len)


def _request(case: Ended) -> Request:
    request, output_ids = case.session.request, tuple(_output_of(case).tolist())
    params = replace(
        request.params,
        forced_ids=output_ids,
        prediction=(),
        max_tokens=len(output_ids),
        logprobs=None,
    )
    return replace(
        request,
        id=f"audit/{secrets.token_hex(8)}",
        params=params,
        speculation=SpeculationOptions(enabled=False),
        output_ids=EMPTY_TOKENS,
        was_admitted=False,
        tenant=secrets.token_bytes(16),
        timeout_s=0.0,
    )


def _keep(folder: Path, case: Ended, redraws: list[Redraw]) -> None:
    request = case.session.request
    record = {
        "request_id": request.id,
        "target": case.target_id,
        "task": request.task,
        "adapter": request.adapter,
        "params": dataclasses.asdict(request.params),
        "prompt_ids": request.prompt_ids.tolist(),
        "output_ids": _output_of(case).tolist(),
        "redraws": [dataclasses.asdict(each) for each in redraws],
    }
    name = re.sub(r"[^A-Za-z0-9_-]", "_", request.id)[:64]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if len(list(folder.glob("*.json"))) >= _MAX_FILES:
            log.warning("audit: %s has %d mismatches; remove some to keep more", folder, _MAX_FILES)
            return
        path = folder / f"{time.time_ns()}-{name}.json"
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(json.dumps(record))
    except OSError as error:
        log.error("audit: a mismatch cannot be kept in %s: %s", folder, error)
