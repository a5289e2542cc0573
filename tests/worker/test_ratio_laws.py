"""The textbook's laws through the target's step loop: the law is tested, for texts depend on
drafts there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from cluster.core import SamplingParams, TokenArray, TokenTree
from cluster.draft.base import Drafter
from cluster.messages import TextVerdict
from cluster.requests.fields import LAWS, Law
from cluster.spec.penalties import TokenMask
from cluster.worker.verifier import OpenHook, Verifier
from tests.support.choices import by_day
from tests.support.clock import FakeClock
from tests.support.draft.toy_lm import ToyLM
from tests.support.spec.ratio_world import Floats, Ints, hashed, p_value
from tests.support.worker.residents import resident
from tests.support.worker.steps import steps
from tests.support.worker.texts import opened
from tests.support.worker.toy_engine import ToyEngine

PASS = 1e-3
NUM_TEXTS, NUM_TOKENS, AT_ONCE = by_day(200, 2000), 4, by_day(200, 400)
TARGET, DRAFT = hashed(4, 1), hashed(4, 2)
RATIO_LAWS = pytest.mark.parametrize("law", LAWS[1:])


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
    told: list[list[TextVerdict]] = []
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


@RATIO_LAWS
@pytest.mark.parametrize("is_believed", [True, False], ids=["drawn", "chosen"])
async def test_texts_follow_the_targets_law_and_drafts_are_accepted_as_in_theory(
    law: Law, *, is_believed: bool
) -> None:
    drafter = ToyLM(DRAFT)
    written = await write(law, drafter, is_believed=is_believed)

    assert p_value(TARGET, written.tokens) > PASS
    # Of a chain's first draft; the token before it is the text's first one.
    draft = DRAFT if is_believed else chosen(DRAFT)
    theory = float(TARGET[0] @ np.minimum(TARGET, draft).sum(1))
    share = float((written.accepted > 0).mean())
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
        kept: list[int] = []
        for node, parent in enumerate(tree.parents.tolist()):
            if tree.token_ids[node] and (parent < 0 or parent in kept):
                kept.append(node)
        self._num_rows = len(kept) + 1
        return kept

    def masks(self) -> TokenMask:
        return np.full((self._num_rows, 1), 0b1110, np.uint32)


@pytest.mark.parametrize("law", by_day(LAWS[-1:], LAWS[1:]))
async def test_a_grammar_may_cut_off_drawn_nodes(law: Law) -> None:
    # Half of its drafts are cut off: a rule that believed the other half would be convicted.
    zeros = 0.5 * DRAFT + 0.5 * (np.arange(len(DRAFT)) == 0)

    written = await write(law, ToyLM(zeros), hook=lambda item: NoZeros())

    allowed = TARGET * (np.arange(len(TARGET)) > 0)
    assert p_value(allowed / allowed.sum(1, keepdims=True), written.tokens[:, :2]) > PASS
    assert written.accepted.mean() > 0.05


async def test_a_text_that_moves_repeats_what_was_lost_with_other_drafts() -> None:
    # Of a step that drew with the drafts of one law, only the text before it is left.
    begun = (await write("rejection", ToyLM(DRAFT))).tokens[:, :2]

    written = await write("rejection", ToyLM(hashed(4, 3)), begun=begun)

    assert p_value(TARGET, written.tokens) > PASS


async def test_greedy_texts_are_coupled_under_every_law() -> None:
    texts = {}
    for law in LAWS:
        async with steps(toy_engine(), [resident(ToyLM(DRAFT), is_believed=True)]) as built:
            desk = built.connect()
            params = SamplingParams(temperature=0.0, max_tokens=20, law=law)
            desk.post(opened("r", (0,), params, drafters=("a",)))
            await built.run()
            texts[law] = desk.text()
    assert len(set(map(tuple, texts.values()))) == 1
