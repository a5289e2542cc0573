"""What a toy target says, and what it would have said without any drafts."""

import functools
from collections.abc import Sequence

import numpy as np

from cluster.core import SamplingParams
from cluster.worker.verifier import Verifier
from tests.support.worker.rounds import Session, decode_all, no_drafts, until_stop
from tests.support.worker.toy_engine import ToyEngine, hashed_law

VOCAB_SIZE = 32
_NO_LIMIT = 1 << 20


def toy_law(context: Sequence[int]) -> np.ndarray:
    """Logits by the last three tokens, so that texts have structure a drafter can learn."""
    return _logits(tuple(int(token) for token in context[-3:]))


@functools.cache
def _logits(last: tuple[int, ...]) -> np.ndarray:
    return hashed_law(VOCAB_SIZE)(last)


def forget() -> None:
    """The law begins anew, say with another VOCAB_SIZE."""
    _logits.cache_clear()
    _plain.cache_clear()


def plain_draws(prompt: Sequence[int], params: SamplingParams, count: int) -> list[int]:
    """The first draws after a prompt, one by one, whatever ends the text."""
    verifier, session = _plain(tuple(int(token) for token in prompt), params)
    decode_all(verifier, [session], [no_drafts], count)
    return session.output[:count]


@functools.cache
def _plain(prompt: tuple[int, ...], params: SamplingParams) -> tuple[Verifier, Session]:
    verifier = Verifier(ToyEngine(toy_law, VOCAB_SIZE, _NO_LIMIT))
    return verifier, Session("plain", prompt, params)


def plain_text(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """What decoding without any speculation emits, stop tokens excluded."""
    return until_stop(plain_draws(prompt, params, params.max_tokens), params)
