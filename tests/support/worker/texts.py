"""Texts for a toy target, what they must become, and what a coordinator is told of them."""

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cluster.core import FinishReason, SamplingParams, TokenTree, token_array
from cluster.rpc.messages import Open, PoolTree, Refusal, TextVerdict, VerdictFrame
from cluster.spec.token_log import prefix_hash
from cluster.worker.verifier import Verifier
from tests.support.worker.rounds import decode, until_stop
from tests.support.worker.toy_engine import VOCAB_SIZE as VOCAB_SIZE
from tests.support.worker.toy_engine import ToyEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SEEDED = SamplingParams(temperature=0.8, seed=11, max_tokens=40)
LAWS = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
PROMPT = (1, 2, 3)


def opened(
    name: str = "r",
    prompt: Sequence[int] = PROMPT,
    params: SamplingParams = GREEDY,
    written: Sequence[int] = (),
    **fields: Any,
) -> Open:
    """written: the output so far."""
    tokens = token_array([*prompt, *written])
    known = {
        "generation": 1,
        "token_ids": tokens,
        "prefix_hash": prefix_hash(tokens),
        "prompt_len": len(prompt),
        "params": params,
        "max_len": len(prompt) + params.max_tokens,
        "max_draft_tokens": 16,
    }
    return Open(name, **{**known, **fields})


def pool_tree(
    context: Sequence[int],
    tree: TokenTree,
    sources: Sequence[int] = (),
    name: str = "r",
    **fields: Any,
) -> PoolTree:
    """A tree of the pool that continues `context`; all of the first drafter without sources."""
    known = {
        "generation": 1,
        "base_len": len(context),
        "prefix_hash": prefix_hash(context),
        "tree": tree,
        "survival": np.full(len(tree), 0.9, np.float32),
        "sources": np.array(sources or [1] * len(tree), np.uint32),
    }
    return PoolTree(name, **{**known, **fields})


def plain(prompt: Sequence[int] = PROMPT, params: SamplingParams = GREEDY) -> list[int]:
    """The text that the toy target writes alone, token by token."""
    return list(_plain(tuple(prompt), params))


@functools.cache
def _plain(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    verifier = Verifier(ToyEngine())
    return until_stop(decode(verifier, prompt, params, num_tokens=params.max_tokens), params)


class Told:
    """What one coordinator was told."""

    def __init__(self) -> None:
        self.frames: list[VerdictFrame] = []
        self.verdicts: dict[str, list[TextVerdict]] = defaultdict(list)
        self.refusals: dict[str, list[Refusal]] = defaultdict(list)

    def take(self, frame: VerdictFrame) -> None:
        self.frames.append(frame)
        for verdict in frame.verdicts:
            self.verdicts[verdict.request_id].append(verdict)
        for refusal in frame.refusals:
            assert refusal.message
            self.refusals[refusal.request_id].append(refusal)

    def text(self, name: str = "r") -> list[int]:
        """The tokens of a text, after a check that nothing is missing and nothing comes twice."""
        tokens: list[int] = []
        verdicts = self.verdicts[name]
        for verdict in verdicts:
            assert verdict.context_len == verdicts[0].context_len + len(tokens)
            tokens += verdict.token_ids.tolist()
        assert all(verdict.finish_reason is None for verdict in verdicts[:-1])
        return tokens

    def reason(self, name: str = "r") -> FinishReason | None:
        """Why a text has ended; None = it has not."""
        return self.verdicts[name][-1].finish_reason if self.verdicts[name] else None

    def is_over(self, name: str = "r") -> bool:
        return self.reason(name) is not None or bool(self.refusals[name])
