"""Audits: a finished text is verified once more, to see that every token is what the target draws.

The whole text is given to a target, as one that is scored, with the parameters and the seed that it
was written by.  The target draws at every place, from rows that no draft, no cached page and no
batch of that time had a part in: the audit is a tenant of its own.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from cluster import metrics
from cluster.config.schema import Config
from cluster.coordinator.session import Deliver, Session
from cluster.core import (
    EMPTY_TOKENS,
    FinishReason,
    Request,
    SpeculationOptions,
    TokenArray,
    TokenEvent,
)
from cluster.metrics.recorder import Recorder
from cluster.requests.redraw import Redraw

log = logging.getLogger(__name__)

_MAX_CASES = 32
# A server without idle time is audited all the same.
_PATIENCE_S = 30.0
_MAX_FILES = 64
_TENANT_BYTES = 16


class Table(Protocol):
    """What runs sessions, as far as audits are concerned."""

    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    def audit(self, request: Request, deliver: Deliver, shunned_target: str) -> Session: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    request: Request
    output_ids: TokenArray
    target_id: str
    since: float


class Auditor:
    """Chooses finished texts, and has them verified one after the other."""

    def __init__(self, config: Config, recorder: Recorder, clock: Callable[[], float]) -> None:
        self._recorder = recorder
        self._clock = clock
        self._due = 0.0  # texts that are to be chosen
        self._cases: deque[_Case] = deque()
        self._is_running = False
        self.use(config)

    def use(self, config: Config) -> None:
        """Go on by another configuration."""
        self._settings = config.coordinator.audit
        is_reproducible = config.target.engine.reproducible
        self._tie_margin = 0.0 if is_reproducible else self._settings.tie_margin

    def note(self, session: Session, reason: FinishReason) -> None:
        """A session has ended; its text may be chosen."""
        params, num_tokens = session.request.params, session.num_output_tokens
        is_drawn = session.is_drawn and params.is_coupled and reason is not FinishReason.ERROR
        if not self._settings.share or not is_drawn or not num_tokens:
            return
        self._due += self._settings.share
        if self._due < 1.0:
            return
        self._due -= 1.0
        if len(self._cases) >= _MAX_CASES:
            self._count("skipped")
            return
        output_ids = session.tokens.token_ids[session.prompt_len :].copy()
        target_id = session.target.id if session.target is not None else ""
        self._cases.append(_Case(session.request, output_ids, target_id, self._clock()))

    def tick(self, table: Table) -> None:
        """Begin with the next text, if there is time for it."""
        if self._is_running or not self._cases or table.num_waiting:
            return
        if table.num_running and self._clock() - self._cases[0].since < _PATIENCE_S:
            return
        case = self._cases.popleft()
        self._is_running = True
        name = f"audit/{secrets.token_hex(8)}"
        session: Session | None = None

        def deliver(event: TokenEvent) -> None:
            if event.finish_reason is None:
                return
            self._is_running = False
            done = session is not None and session.num_output_tokens == len(case.output_ids)
            redraws = session.redraws if session is not None and done else None
            self._conclude(case, redraws)
            self.tick(table)

        session = table.audit(_request(case, name), deliver, case.target_id)

    def _conclude(self, case: _Case, redraws: list[Redraw] | None) -> None:
        """redraws: None = it came to no end."""
        if redraws is None:
            self._count("failed")
            return
        if not redraws:
            self._count("equal")
            return
        is_tie = all(each.gap <= self._tie_margin for each in redraws)
        self._count("near_tie" if is_tie else "mismatch")
        if is_tie:
            return
        worst = max(redraws, key=lambda each: each.gap)
        log.error(
            "audit: the text of request=%s target=%s is not what is drawn now: place=%d token=%d "
            "drawn=%d gap=%.4f places=%d of %d",
            case.request.id, case.target_id, worst.position,
            case.output_ids[worst.position], worst.token_id, worst.gap, len(redraws),
            len(case.output_ids),
        )  # fmt: skip
        if self._settings.folder:
            _keep(Path(self._settings.folder), case, redraws)

    def _count(self, outcome: str) -> None:
        self._recorder.add(metrics.AUDITED, outcome=outcome)


def _request(case: _Case, name: str) -> Request:
    params = replace(
        case.request.params, forced_ids=tuple(case.output_ids.tolist()), prediction=(),
        max_tokens=len(case.output_ids), logprobs=None,
    )  # fmt: skip
    return replace(
        case.request, id=name, params=params, speculation=SpeculationOptions(enabled=False),
        output_ids=EMPTY_TOKENS, tenant=secrets.token_bytes(_TENANT_BYTES), timeout_s=0.0,
    )  # fmt: skip


def _keep(folder: Path, case: _Case, redraws: list[Redraw]) -> None:
    request = case.request
    record = {
        "request_id": request.id,
        "target": case.target_id,
        "task": request.task,
        "adapter": request.adapter,
        "params": dataclasses.asdict(request.params),
        "prompt_ids": request.prompt_ids.tolist(),
        "output_ids": case.output_ids.tolist(),
        "redraws": [dataclasses.asdict(each) for each in redraws],
    }
    name = re.sub(r"[^A-Za-z0-9_-]", "_", request.id)[:64]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if len(list(folder.glob("*.json"))) >= _MAX_FILES:
            log.warning("audit: %s has %d mismatches; remove some to keep more", folder, _MAX_FILES)
            return
        path = folder / f"{time.time_ns()}-{name}.json"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(record, file)
    except OSError as error:
        log.error("audit: a mismatch cannot be kept in %s: %s", folder, error)
