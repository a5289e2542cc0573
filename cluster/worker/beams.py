"""Beam searches at the target: each answers one item after many steps, like a long prefill.

A step evaluates the newest token of each beam beside the rows of all other requests, so no request
waits for a search.  A search depends on its item alone: if it is lost, the item is sent again.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from cluster.core import TokenLogprob, Verdict, VerifyItem, token_array
from cluster.engine.beam_search import BeamRun, Retaining
from cluster.engine.limits import Limits
from cluster.engine.work import Output, Work
from cluster.errors import ProtocolError, RequestError
from cluster.requests.beam_spec import BeamEnd
from cluster.spec.beam_search import Hypothesis

# The most tokens of all beams beyond their common prefix: a step handles each pair of them, also on
# the host.
_MAX_LIVE_TOKENS = 4096


class BeamEngine(Retaining, Protocol):
    """The part of `cluster.engine.engine.Engine` that searches use."""

    @property
    def limits(self) -> Limits: ...
    @property
    def max_context_len(self) -> int: ...
    def submit(self, work: Work) -> None: ...


class Beams:
    """The running searches, by request.  Used by one thread."""

    def __init__(self, engine: BeamEngine) -> None:
        self._engine = engine
        self._runs: dict[str, BeamRun] = {}
        self._num_rows = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._runs

    def open(self, item: VerifyItem, adapter: int) -> Work:
        """Return the first work of the item's search; raises RequestError if it cannot fit.

        adapter: as in `Work`."""
        params = item.params
        if params is None or params.beams is None or len(item.tree):
            raise ProtocolError("a beam search begins with its parameters and without drafts")
        room = self._engine.max_context_len - item.context_len
        max_tokens = min(params.max_tokens, room)
        if max_tokens < 1:
            raise RequestError(
                f"the prompt has {item.context_len} tokens, which leaves no room in a context of "
                f"{self._engine.max_context_len}; shorten it",
                param="prompt",
            )
        self._check_room(item.context_len, params.beams.num_beams, max_tokens)
        run = self._runs[item.request_id] = BeamRun(
            item.request_id, item.delta, params.beams, max_tokens, params.stop_token_ids,
            params.logprobs, item.tenant, adapter,
        )  # fmt: skip
        return run.work()

    def _check_room(self, prompt_len: int, num_beams: int, max_tokens: int) -> None:
        """Raise RequestError if the beams of the search might come to hold too many tokens."""
        most = num_beams * max_tokens
        if most > _MAX_LIVE_TOKENS:
            raise RequestError(
                f"{num_beams} beams of {max_tokens} tokens are {most}, a search may hold "
                f"{_MAX_LIVE_TOKENS}; send fewer beams (n, best_of) or a smaller max_tokens",
                param="max_tokens",
            )
        error = self._engine.limits.too_large(prompt_len, most)
        if error is not None:
            raise RequestError(
                f"{num_beams} beams of {max_tokens} tokens behind a prompt of {prompt_len} cannot "
                f"be sure of their place: {error.message}",
                param="max_tokens",
            )

    def take(self, item: VerifyItem, output: Output) -> Verdict | None:
        """Continue with the engine's answer; returns the verdict at the end, before that None.

        Raises RequestError."""
        run = self._runs[item.request_id]
        if output.top is not None:
            self._num_rows += len(output.top.token_ids)
        run.take(output, self._engine)
        if not run.is_done:
            self._engine.submit(run.work())
            return None
        return _verdict(item, run.hypotheses)

    def forget(self, request_id: str) -> None:
        """Drop a search; the caller tells the engine.  Unknown ones are ignored."""
        self._runs.pop(request_id, None)

    def take_num_rows(self) -> int:
        """Return the rows that searches had in the engine's answers since the last call."""
        count, self._num_rows = self._num_rows, 0
        return count


def _verdict(item: VerifyItem, found: list[Hypothesis]) -> Verdict:
    ends: list[BeamEnd] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    for one in found:
        if not np.isfinite(one.score):
            raise RequestError(
                "the model's logits have no finite law here; the model or its dtype overflows"
            )
        # A stop token ends a text and is not part of it.
        text = one.beam.lineage()[: -1 if one.is_stopped else None]
        token_ids += [beam.token_id for beam in text]
        logprobs += [beam.chosen for beam in text if beam.chosen is not None]
        ends.append(BeamEnd(len(text), one.is_stopped, float(one.beam.logprob), float(one.score)))
    return Verdict(
        request_id=item.request_id,
        generation=item.generation,
        context_len=item.context_len,
        path=item.tree.token_ids,  # empty: the tree has no nodes
        token_ids=token_array(token_ids),
        logprobs=tuple(logprobs),
        beams=tuple(ends),
    )
