"""How long a target's residents draft, and read, before anyone is served.

A coordinator that knows it need not find it out at the cost of requests: a model may take longer
to read a crowd's prompts than the crowd takes for its answers.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cluster.core import EMPTY_TREE, SamplingParams, VerifyItem, token_array
from cluster.spec.step_profile import DraftTime
from cluster.spec.token_log import TokenLog
from cluster.worker.resident import ResidentText
from cluster.worker.residents import Residents
from cluster.worker.step_verifier import StepVerifier

log = logging.getLogger(__name__)

_SEQUENCES = (1, 4, 16)
# The first turn of each kind warms it up; of the others of one size the faster one counts.
_NODES = (8, 8, 2, 24, 8, 2, 24)
_PROMPT_LEN = 8
_READ_LEN = 128  # of a prompt, as chats have them
_MAX_S = 2.0
_TENANT = b"draft-profile"  # look-ups keep what they learn of it from everybody else


def profile_drafting(
    verifier: StepVerifier,
    residents: Residents,
    vocab_size: int,
    max_sequences: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[DraftTime, ...]:
    """What turns of the residents take after steps of up to max_sequences sequences, whose texts
    the target draws; empty where there are none, or where that cannot be measured.

    It ends with the first turn after two seconds.
    """
    found: list[DraftTime] = []
    deadline = clock() + _MAX_S
    num_opened = 0
    sizes = [each for each in _SEQUENCES if each <= max_sequences]
    for count, with_models in itertools.product(sizes, residents.kinds):
        if clock() > deadline:
            break
        # Texts of its own: what another kind has read of a text is no measure.
        numbers = range(num_opened, num_opened + count)
        num_opened += count
        group = _Group(verifier, residents, vocab_size, numbers, clock)
        try:
            found += group.drafting(with_models, deadline)
            if with_models and count == 1:
                found += group.reading()
        except Exception:  # a defect of ours: the target serves without knowing
            log.exception("drafting could not be timed")
            return ()
        finally:
            group.release()
    residents.begin_afresh(is_warm=True)
    return tuple(found)


@dataclass(slots=True, eq=False)
class _Written:
    """A text that the target draws.  num_held: tokens of it that it holds."""

    resident: ResidentText
    num_held: int = 0

    def item(self) -> VerifyItem:
        opens, own = self.num_held == 0, self.resident
        return VerifyItem(
            own.request_id, own.generation, self.num_held, own.tokens.hash_at(self.num_held),
            own.tokens.since(self.num_held), EMPTY_TREE, own.prompt_len,
            params=own.params if opens else None, tenant=_TENANT if opens else b"",
        )  # fmt: skip


class _Group:
    """Texts that are written at once."""

    def __init__(
        self,
        verifier: StepVerifier,
        residents: Residents,
        vocab_size: int,
        numbers: range,
        clock: Callable[[], float],
    ) -> None:
        self._verifier = verifier
        self._residents = residents
        self._clock = clock
        self._vocab_size = vocab_size
        self._open(numbers, _PROMPT_LEN)

    def drafting(self, with_models: bool, deadline: float) -> list[DraftTime]:
        count = len(self._texts)
        best: dict[int, float] = {}
        for turn, nodes in enumerate(_NODES):
            time_s = self._round(nodes, with_models)
            if turn == 0 and count == 1:
                self._residents.begin_afresh(is_warm=False)
            if turn and time_s:
                best[nodes] = min(best.get(nodes, time_s), time_s)
            if self._clock() > deadline:
                break
        return [DraftTime(count, nodes, with_models, time_s) for nodes, time_s in best.items()]

    def reading(self) -> list[DraftTime]:
        """Of one prompt."""
        self.release()
        self._open(range(1), _READ_LEN)
        nodes = _NODES[0]
        time_s = self._round(nodes, with_models=True)
        return [DraftTime(1, nodes, True, time_s, num_read=1)] if time_s else []

    def _open(self, numbers: range, prompt_len: int) -> None:
        self._texts: dict[str, _Written] = {}
        for number in numbers:
            params = SamplingParams(temperature=1.0, seed=number + 1, max_tokens=1 << 20)
            tokens = TokenLog(token_array((number + np.arange(prompt_len)) % self._vocab_size))
            name = f"draft-profile-{number}-{prompt_len}"
            self._texts[name] = _Written(
                ResidentText(
                    name, 1, prompt_len, params, "", _TENANT, frozenset(self._residents.names),
                    tokens,
                )
            )  # fmt: skip

    def release(self) -> None:
        request_ids = list(self._texts)
        self._verifier.release(request_ids)
        self._residents.release(request_ids)

    def _round(self, nodes: int, with_models: bool) -> float:
        """A step of all texts and what residents draft after it; returns what that took, 0 = it
        took several steps, or there was an error."""
        items = {request_id: text.item() for request_id, text in self._texts.items()}
        if self._verifier.submit(list(items.values())):
            return 0.0
        answered, time_s = 0, 0.0
        while self._verifier.has_pending:
            stepped = self._verifier.step()
            own = [self._texts[each.request_id] for each in stepped.verdicts]
            for text, verdict in zip(own, stepped.verdicts, strict=True):
                text.num_held = verdict.context_len
                text.resident.tokens.append(verdict.token_ids)
                text.resident.draft_nodes = nodes
                text.resident.only_look_ups = not with_models
            drafted = self._residents.draft(
                [text.resident for text in own], stepped.report.step_time_s,
                self._verifier.last_rows,
            )  # fmt: skip
            answered, time_s = len(own), drafted.time_s
        return time_s if answered == len(items) else 0.0
