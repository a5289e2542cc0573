"""Beam searches at the target: each answers one text after many steps, like a long prefill.

A step evaluates the newest token of each beam beside the rows of all other requests, so no request
waits for a search.  A search depends on its text alone: if it is lost, it begins again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cluster.core import EMPTY_TOKENS, TokenLogprob, Verdict, token_array
from cluster.engine.beam_search import BeamRun
from cluster.errors import ContextLengthError, RequestError
from cluster.requests.beam_spec import BeamEnd, BeamSpec
from cluster.worker.texts import TargetText

if TYPE_CHECKING:
    from cluster.engine.engine import Engine

# The most tokens of all beams beyond their common prefix: a step handles each pair of them, also on
# the host.
_MAX_LIVE_TOKENS = 4096


def open_search(text: TargetText, beams: BeamSpec, adapter: int, engine: Engine) -> BeamRun:
    """Return the search that the text is; raises RequestError if it cannot fit.

    adapter: as in `Work`."""
    params, prompt_len = text.params, len(text.tokens)
    max_tokens = min(params.max_tokens, engine.max_context_len - prompt_len)
    if max_tokens < 1:
        raise ContextLengthError.of(
            prompt_len, engine.max_context_len, "reduce the length of the prompt"
        )
    most = beams.num_beams * max_tokens
    if most > _MAX_LIVE_TOKENS:
        raise RequestError(
            f"{beams.num_beams} beams of {max_tokens} tokens are {most}, a search may hold "
            f"{_MAX_LIVE_TOKENS}; send fewer beams (n, best_of) or a smaller max_tokens",
            param="max_tokens",
        )
    error = engine.limits.too_large(prompt_len, most)
    if error is not None:
        raise RequestError(
            f"{beams.num_beams} beams of {max_tokens} tokens behind a prompt of {prompt_len} "
            f"cannot be sure of their place: {error.message}",
            param="max_tokens",
        )
    return BeamRun(
        text.id,
        text.tokens.token_ids,
        beams,
        max_tokens,
        params.stop_token_ids,
        params.logprobs,
        text.opened.tenant,
        adapter,
    )


def beam_verdict(text: TargetText, search: BeamRun) -> Verdict:
    """Return the verdict that ends a finished search; raises RequestError for broken logits."""
    ends: list[BeamEnd] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    for one in search.hypotheses:
        if not np.isfinite(one.score):
            raise RequestError(
                "the model's logits have no finite law here; the model or its dtype overflows"
            )
        # A stop token ends a text and is not part of it.
        path = one.beam.lineage()[: -1 if one.is_stopped else None]
        token_ids += [beam.token_id for beam in path]
        logprobs += [beam.chosen for beam in path if beam.chosen is not None]
        ends.append(BeamEnd(len(path), one.is_stopped, float(one.beam.logprob), float(one.score)))
    return Verdict(
        text.id,
        len(text.tokens),
        EMPTY_TOKENS,
        token_array(token_ids),
        tuple(logprobs),
        beams=tuple(ends),
    )
