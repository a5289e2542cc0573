"""A hook decides what may be drawn after each text, with drafts as without."""

from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cluster.core import EMPTY_TREE, SamplingParams, TokenArray, TokenMask, TokenTree
from cluster.draft.base import Drafter
from cluster.engine.cpu import kernels
from cluster.errors import RequestError
from cluster.requests.fields import LAWS, Law
from cluster.worker.step_rows import TargetSequence
from cluster.worker.texts import TargetText
from cluster.worker.verifier import OpenHook, Verifier
from tests.support.choices import by_day
from tests.support.clock import FakeClock
from tests.support.draft.toy_lm import ToyLM
from tests.support.spec.ratio_world import Floats, Ints, hashed, p_value
from tests.support.worker.residents import resident
from tests.support.worker.rounds import (
    Session,
    decode,
    decode_all,
    drafters_around,
    half_right,
)
from tests.support.worker.steps import steps, written
from tests.support.worker.texts import opened
from tests.support.worker.toy_engine import ToyEngine

VOCAB_SIZE = 12
PROMPT = [3, 1, 4, 1, 5]
DRAWN = {
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
        kept = []
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
    bits = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 32), np.bool_)
    bits[:, : allowed.shape[1]] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


def is_allowed(text: Sequence[int]) -> list[bool]:
    return [
        token % 3 == (text[-1] + 1) % 3 and (token < 10 or len(text) % 2 == 1)
        for token in range(VOCAB_SIZE)
    ]


def verifier() -> Verifier:
    def open_hook(text: TargetText) -> Allowed | None:
        return None if text.id == "free" else Allowed()

    return Verifier(ToyEngine(vocab_size=VOCAB_SIZE), open_hook=open_hook)


@pytest.mark.parametrize("without_compiler", [False, True])
@pytest.mark.parametrize("params", DRAWN.values(), ids=DRAWN)
def test_texts_obey_it_and_no_tree_changes_them(
    params: SamplingParams, without_compiler: bool, monkeypatch: pytest.MonkeyPatch
):
    if without_compiler:
        monkeypatch.setattr(kernels, "load", lambda: None)
    plain = decode(verifier(), PROMPT, params, num_tokens=40)
    text = PROMPT + plain
    for length in range(len(PROMPT), len(text)):
        assert is_allowed(text[:length])[text[length]]
    for drafter in drafters_around(text, VOCAB_SIZE, by_day(1, 4)):
        assert decode(verifier(), PROMPT, params, drafter, 40) == plain


def test_others_in_the_batch_are_left_alone():
    params = DRAWN["T1"]
    free = decode(Verifier(ToyEngine(vocab_size=VOCAB_SIZE)), PROMPT, params)
    bound = decode(verifier(), PROMPT, params)
    assert free != bound
    sessions = [Session(name, PROMPT, params) for name in ("free", "bound")]
    drafters = [half_right(PROMPT + text, 2, VOCAB_SIZE) for text in (free, bound)]
    decode_all(verifier(), sessions, drafters, 20)
    assert [session.output[:20] for session in sessions] == [free, bound]


def test_tokens_that_are_banned_are_drawn_where_a_hook_allows_no_other():
    """A grammar's end goes before min_tokens; what the hook forbids stays forbidden."""

    class Stops(Allowed):
        def masks(self) -> TokenMask:
            return packed(np.isin(np.arange(VOCAB_SIZE), [2, 7])[None])

    params = SamplingParams(1.0, min_tokens=20, stop_token_ids=(2, 5, 7), seed=3)
    hooks = Mock(side_effect=lambda text: Stops())
    target = Verifier(ToyEngine(vocab_size=VOCAB_SIZE), open_hook=hooks)
    assert set(decode(target, PROMPT, params, num_tokens=20)) == {2, 7}
    assert hooks.call_count == 1


def test_a_hook_that_allows_nothing_ends_its_request_with_an_error():
    class Nothing(Allowed):
        def masks(self) -> TokenMask:
            return np.zeros((1, 1), np.uint32)

    engine = ToyEngine(vocab_size=VOCAB_SIZE)
    target = Verifier(engine, open_hook=lambda text: Nothing() if text.id == "r" else None)
    target.submit([Session(name, PROMPT, DRAWN["T1"]).item() for name in ("r", "other")])
    frame = target.step()
    assert [verdict.request_id for verdict in frame.verdicts] == ["other"]
    assert list(frame.refused) == ["r"]
    assert "everything is banned" in frame.refused["r"].message


def test_a_hook_that_fails_leaves_no_mask_of_the_step_before():
    hook, record = Allowed(), Session("a", PROMPT, DRAWN["T1"]).record
    sequence = TargetSequence(record, VOCAB_SIZE, torch.device("cpu"), hook)
    sequence.begin(EMPTY_TREE)
    sequence.ask_hook()
    assert sequence.mask is not None
    hook.masks = Mock(side_effect=RequestError("no more"))  # type: ignore[method-assign]
    sequence.ask_hook()
    assert sequence.failure is not None
    assert sequence.mask is None


# The textbook's laws through the target's step loop: the law is tested, for texts depend on
# drafts there.


PASS = 1e-3
NUM_TEXTS, NUM_TOKENS, AT_ONCE = by_day(200, 2000), 4, by_day(200, 400)
TARGET, DRAFT = hashed(4, 1), hashed(4, 2)


def toy_engine() -> ToyEngine:
    logits = np.log(TARGET).astype(np.float32)
    return ToyEngine(lambda context: logits[context[-1]], len(TARGET))


def asked(law: Law, seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=NUM_TOKENS, law=law)


@dataclass(frozen=True)
class Written:
    """tokens: int64[texts, NUM_TOKENS].  accepted: the drafts of each text that were accepted in
    the first step with drafts, which is its second one."""

    tokens: Ints
    accepted: Ints


async def write(
    law: Law,
    drafter: Drafter,
    *,
    is_believed: bool = True,
    hook: OpenHook = lambda item: None,
    begun: Ints | None = None,
) -> Written:
    """begun: the beginnings of the texts, which were written elsewhere."""
    own = resident(drafter, clock=FakeClock(), is_believed=is_believed)
    told = []
    verifier = Verifier(toy_engine(), FakeClock(), hook)
    async with steps(
        toy_engine(),
        [own],
        verifier=verifier,
        max_texts=AT_ONCE,
        max_rows=16 * AT_ONCE,
        max_draft_tokens=3,
    ) as built:
        desk = built.connect()
        for start in range(0, NUM_TEXTS, AT_ONCE):
            names = [str(seed) for seed in range(start, start + AT_ONCE)]
            opens = [
                opened(
                    each,
                    (0,),
                    asked(law, int(each)),
                    drafters=("a",),
                    written=() if begun is None else begun[int(each)].tolist(),
                )
                for each in names
            ]
            desk.post(*opens)
            await built.run()
            told += [desk.verdicts[each] for each in names]
    tokens = np.array([np.concatenate([each.token_ids for each in one]) for one in told])
    if begun is not None:
        tokens = np.concatenate((begun, tokens), axis=1)
    return Written(tokens, np.array([len(each[1].sources) for each in told]))


def chosen(law: Floats) -> Floats:
    return np.eye(len(law))[law.argmax(1)]


@pytest.mark.parametrize("law", LAWS[1:])
@pytest.mark.parametrize("is_believed", [True, False], ids=["drawn", "chosen"])
async def test_texts_follow_the_targets_law_and_drafts_are_accepted_as_in_theory(
    law: Law, *, is_believed: bool
):
    drafter = ToyLM(DRAFT)
    texts = await write(law, drafter, is_believed=is_believed)

    assert p_value(TARGET, texts.tokens) > PASS
    # Of a chain's first draft; the token before it is the text's first one.
    draft = DRAFT if is_believed else chosen(DRAFT)
    theory = float(TARGET[0] @ np.minimum(TARGET, draft).sum(1))
    share = float((texts.accepted > 0).mean())
    error = (theory * (1.0 - theory) / NUM_TEXTS) ** 0.5
    if law == "rejection" and is_believed:
        assert abs(share - theory) < 2.0 * error
    else:  # several siblings
        assert share > theory - 2.0 * error
    told = drafter.params[0]
    assert told.law == (law if is_believed else "coupled")
    assert told.seed != asked(law, 0).seed


class NoZeros:
    """Bans token 0, and says of every tree which nodes are left."""

    def extend(self, token_ids: TokenArray) -> None:
        pass

    def prepare(self, tree: TokenTree) -> Sequence[int]:
        kept = []
        for node, parent in enumerate(tree.parents.tolist()):
            if tree.token_ids[node] and (parent < 0 or parent in kept):
                kept.append(node)
        self._num_rows = len(kept) + 1
        return kept

    def masks(self) -> TokenMask:
        return np.full((self._num_rows, 1), 0b1110, np.uint32)


@pytest.mark.parametrize("law", by_day(LAWS[-1:], LAWS[1:]))
async def test_a_grammar_may_cut_off_drawn_nodes(law: Law):
    # Half of its drafts are cut off: a rule that believed the other half would be convicted.
    zeros = 0.5 * DRAFT + 0.5 * (np.arange(len(DRAFT)) == 0)

    texts = await write(law, ToyLM(zeros), hook=lambda item: NoZeros())

    allowed = TARGET * (np.arange(len(TARGET)) > 0)
    assert p_value(allowed / allowed.sum(1, keepdims=True), texts.tokens[:, :2]) > PASS
    assert texts.accepted.mean() > 0.05


async def test_a_text_that_moves_repeats_what_was_lost_with_other_drafts():
    # Of a step that drew with the drafts of one law, only the text before it is left.
    begun = (await write("rejection", ToyLM(DRAFT))).tokens[:, :2]

    texts = await write("rejection", ToyLM(hashed(4, 3)), begun=begun)

    assert p_value(TARGET, texts.tokens) > PASS


async def test_greedy_texts_are_coupled_under_every_law():
    texts = set()
    for law in LAWS:
        text = opened("r", (0,), SamplingParams(0.0, max_tokens=20, law=law), drafters=("a",))
        residents = [resident(ToyLM(DRAFT), is_believed=True)]
        desk = await written(text, engine=toy_engine(), residents=residents)
        texts.add(tuple(desk.text()))
    assert len(texts) == 1
