"""A hook decides what may be drawn after each text, with drafts as without."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cluster.core import EMPTY_TREE, SamplingParams, TokenArray, TokenTree
from cluster.engine.cpu import kernels
from cluster.errors import RequestError
from cluster.spec.penalties import TokenMask
from cluster.worker.target_sequence import TargetSequence
from cluster.worker.texts import TargetText
from cluster.worker.verifier import Verifier
from tests.support.choices import by_day
from tests.support.worker.rounds import (
    Session,
    chain_of_the_truth,
    decode,
    decode_all,
    half_right,
    random_drafts,
)
from tests.support.worker.toy_engine import ToyEngine

VOCAB_SIZE = 12
PROMPT = [3, 1, 4, 1, 5]
LAWS = {
    "greedy": SamplingParams(0.0),
    "T1": SamplingParams(1.0, seed=3),
    "top_p": SamplingParams(1.0, top_p=0.8, seed=5),
    "bias and penalties": SamplingParams(
        0.8, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias=((2, 3.0), (7, 3.0)), seed=7
    ),
}


class Allowed:
    """A mask of allowed tokens per node: each token must leave the rest that the one before it
    says, and where the whole text is of even length it must be below ten."""

    def __init__(self) -> None:
        self.text = PROMPT

    def extend(self, token_ids: TokenArray) -> None:
        self.text = [*self.text, *token_ids.tolist()]

    def prepare(self, tree: TokenTree) -> Sequence[int]:
        """At every other call it names the nodes that may be drawn, else it leaves all in."""
        self.texts = [self.text]
        for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
            self.texts.append([*self.texts[parent + 1], token])
        if len(self.text) % 2:
            return range(len(tree))
        kept: list[int] = []
        for node, parent in enumerate(tree.parents.tolist()):
            token = int(tree.token_ids[node])
            if (parent < 0 or parent in kept) and is_allowed(self.texts[parent + 1])[token]:
                kept.append(node)
        self.texts = [self.text, *(self.texts[node + 1] for node in kept)]
        return kept

    def masks(self) -> TokenMask:
        return packed(np.array([is_allowed(text) for text in self.texts]))


def packed(allowed: npt.NDArray[np.bool_]) -> TokenMask:
    """uint32[rows, words] of bool[rows, vocab]."""
    bits = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 32), dtype=np.bool_)
    bits[:, : allowed.shape[1]] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


def is_allowed(text: Sequence[int]) -> list[bool]:
    return [
        token % 3 == (text[-1] + 1) % 3 and (token < 10 or len(text) % 2 == 1)
        for token in range(VOCAB_SIZE)
    ]


def verifier(engine: ToyEngine | None = None) -> Verifier:
    def open_hook(text: TargetText) -> Allowed | None:
        return None if text.id == "free" else Allowed()

    toy = ToyEngine(vocab_size=VOCAB_SIZE)
    return Verifier(engine or toy, open_hook=open_hook)


@pytest.mark.parametrize("without_compiler", [False, True])
@pytest.mark.parametrize("params", LAWS.values(), ids=LAWS.keys())
def test_texts_obey_it_and_no_tree_changes_them(
    params: SamplingParams, without_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_compiler:
        monkeypatch.setattr(kernels, "load", lambda: None)
    plain = decode(verifier(), PROMPT, params, num_tokens=40)
    text = PROMPT + plain
    for length in range(len(PROMPT), len(text)):
        assert is_allowed(text[:length])[text[length]]
    for drafter in (
        chain_of_the_truth(text),
        *(half_right(text, seed, VOCAB_SIZE) for seed in range(by_day(1, 4))),
        random_drafts(1, VOCAB_SIZE),
    ):
        assert decode(verifier(), PROMPT, params, drafter, 40) == plain


def test_others_in_the_batch_are_left_alone() -> None:
    params = LAWS["T1"]
    free = decode(Verifier(ToyEngine(vocab_size=VOCAB_SIZE)), PROMPT, params)
    bound = decode(verifier(), PROMPT, params)
    assert free != bound
    sessions = [Session(name, PROMPT, params) for name in ("free", "bound")]
    drafters = [half_right(PROMPT + text, 2, VOCAB_SIZE) for text in (free, bound)]
    decode_all(verifier(), sessions, drafters, 20)
    assert [session.output[:20] for session in sessions] == [free, bound]


def test_tokens_that_are_banned_are_drawn_where_a_hook_allows_no_other() -> None:
    """A grammar's end goes before min_tokens; what the hook forbids stays forbidden."""

    class Stops(Allowed):
        def masks(self) -> TokenMask:
            return packed(np.isin(np.arange(VOCAB_SIZE), [2, 7])[None])

    params = SamplingParams(1.0, min_tokens=20, stop_token_ids=(2, 5, 7), seed=3)
    target = Verifier(ToyEngine(vocab_size=VOCAB_SIZE), open_hook=lambda _: Stops())
    assert set(decode(target, PROMPT, params, num_tokens=20)) == {2, 7}


def test_a_hook_that_allows_nothing_ends_its_request_with_an_error() -> None:
    class Nothing(Allowed):
        def masks(self) -> TokenMask:
            return np.zeros((1, 1), dtype=np.uint32)

    engine = ToyEngine(vocab_size=VOCAB_SIZE)
    target = Verifier(engine, open_hook=lambda text: Nothing() if text.id == "r" else None)
    target.submit([Session(name, PROMPT, LAWS["T1"]).item() for name in ("r", "other")])
    frame = target.step()
    assert [verdict.request_id for verdict in frame.verdicts] == ["other"]
    assert list(frame.refused) == ["r"]
    assert "everything is banned" in frame.refused["r"].message


def test_a_hook_that_fails_leaves_no_mask_of_the_step_before() -> None:
    hook, record = Allowed(), Session("a", PROMPT, LAWS["T1"]).record
    sequence = TargetSequence(record, VOCAB_SIZE, torch.device("cpu"), hook)
    sequence.begin(EMPTY_TREE)
    sequence.ask_hook()
    assert sequence.mask is not None
    hook.masks = Mock(side_effect=RequestError("no more"))  # type: ignore[method-assign]
    sequence.ask_hook()
    assert sequence.failure is not None
    assert sequence.mask is None
