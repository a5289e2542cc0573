"""Checks what targets answer, before it changes anything."""

from __future__ import annotations

import math

from cluster.coordinator.session import Session
from cluster.core import TokenArray
from cluster.messages import TextVerdict

_MAX_VOCABULARY = 2**31


def problem_of(verdict: TextVerdict, session: Session, vocab_size: int) -> str | None:
    """Why a verdict cannot be one of the session's text, which it continues; None = it can."""
    beams = session.request.params.beams
    if not _are_in(verdict.token_ids, vocab_size):
        return "a token is outside the vocabulary"
    if beams is not None:
        return _problem_of_beams(verdict, beams.num_beams)
    if verdict.beams:
        return "it has beams, the request none"
    if not len(verdict.token_ids) and verdict.finish_reason is None:
        return "it brings nothing"
    if len(verdict.token_ids) > max(session.remaining, 0):
        return f"it brings {len(verdict.token_ids)} tokens, {session.remaining} are left"
    if len(verdict.sources) > verdict.num_nodes:
        return f"it accepts {len(verdict.sources)} drafts of {verdict.num_nodes}"
    if len(verdict.owners) != len(verdict.sources) or not all(
        owner < len(session.text.names) for owner in verdict.owners
    ):
        return "it credits drafters that are none of the text's"
    num_asked = 0 if session.request.params.logprobs is None else len(verdict.token_ids)
    if len(verdict.logprobs) != num_asked:
        return f"it has {len(verdict.logprobs)} log-probabilities"
    first, end = session.num_output_tokens, session.num_output_tokens + len(verdict.token_ids)
    if not all(
        session.is_audit
        and first <= each.position < end
        and 0 <= each.token_id < (vocab_size or _MAX_VOCABULARY)
        and each.gap >= 0.0
        for each in verdict.redraws
    ):
        return "it draws tokens anew where it has none"
    return None


def _problem_of_beams(verdict: TextVerdict, num_beams: int) -> str | None:
    token_ids, ends = verdict.token_ids, verdict.beams
    if not 1 <= len(ends) <= num_beams:
        return f"it has {len(ends)} beams of {num_beams}"
    if sum(end.num_tokens for end in ends) != len(token_ids):
        return "its beams have other numbers of tokens than they say"
    if verdict.logprobs and len(verdict.logprobs) != len(token_ids):
        return f"it has {len(verdict.logprobs)} log-probabilities"
    if not all(math.isfinite(end.logprob) and math.isfinite(end.score) for end in ends):
        return "a score is no number"
    return None if verdict.finish_reason is not None else "it does not end the search"


def _are_in(token_ids: TokenArray, vocab_size: int) -> bool:
    return not len(token_ids) or bool(
        0 <= token_ids.min() <= token_ids.max() < (vocab_size or _MAX_VOCABULARY)
    )
