"""What a coordinator opens: whose it is, what is wrong with it, and how many it may have."""

from typing import Any

import numpy as np
import pytest

from cluster.core import FinishReason, SamplingParams, TokenTree, token_array
from cluster.errors import CapacityError, ProtocolError
from cluster.rpc.messages import PoolTree, TextName
from cluster.worker.texts import TargetText
from tests.support.worker.residents import GreedyOracle, resident
from tests.support.worker.steps import desk_of, steps, written
from tests.support.worker.texts import PROMPT, VOCAB_SIZE, opened, plain, pool_tree
from tests.support.worker.toy_engine import ToyEngine

BAD = {
    "no temperature": (
        {"params": SamplingParams(temperature=-1.0, max_tokens=4)},
        "temperature is -1.0",
    ),
    "a bias of a foreign token": (
        {"params": SamplingParams(logit_bias=((99, 1.0),), max_tokens=4)},
        "logit_bias names token 99",
    ),
    "a given foreign token": (
        {"params": SamplingParams(forced_ids=(1, 99), max_tokens=2)},
        "forced_ids names token 99",
    ),
    "an adapter that is not here": ({"adapter": "french"}, "french"),
    "another hash": ({"prefix_hash": 5}, "prefix_hash is not that of token_ids"),
    "no prompt": ({"prompt_len": 0}, "prompt_len is 0 and there are 3 tokens"),
    "a prompt to come": ({"prompt_len": 4}, "prompt_len is 4 and there are 3 tokens"),
    "a foreign token": ({"prompt": [1, VOCAB_SIZE]}, "outside the target's vocabulary 0..31"),
    "a negative token": ({"prompt": [1, -1]}, "outside the target's vocabulary 0..31"),
    "a text that is over": ({"max_len": 3}, "max_len is 3 and there are 3 tokens"),
    "a drafter twice": ({"drafters": ("a", "b", "a")}, "drafters names one twice"),
}


@pytest.mark.parametrize(("wrong", "message"), BAD.values(), ids=BAD)
async def test_a_text_that_makes_no_sense_is_refused_and_nobody_else_notices(
    wrong: dict[str, Any], message: str
):
    async with steps() as target:
        desk, other = target.connect(), target.connect()
        other.post(opened())
        await target.turn()
        desk.post(opened("good", [7, 8], adapter="sql@1"), opened("bad", **wrong))
        await target.run()
    (refusal,) = desk.refusals["bad"]
    assert refusal.generation == 1
    assert (refusal.code == ProtocolError.code) == wrong.keys().isdisjoint(("params", "adapter"))
    assert message in refusal.message
    assert "bad" not in desk.verdicts
    assert desk.text("good") == plain([7, 8])
    assert other.text() == plain()


async def test_a_newer_generation_takes_the_text_over():
    text = plain()
    async with desk_of(opened(generation=3)) as desk:
        for _ in range(5):
            await desk.turn()
        desk.post(opened(generation=4, written=text[:2]))
        await desk.run()
    generations = [verdict.generation for verdict in desk.verdicts["r"]]
    assert generations == [3] * 5 + [4] * 38
    newer = [token for each in desk.verdicts["r"][5:] for token in each.token_ids.tolist()]
    assert newer == text[2:]
    assert desk.target.engine.contexts == {}


@pytest.mark.parametrize("generation", [3, 2, 0])
async def test_an_older_or_equal_generation_is_ignored(generation: int):
    async with desk_of(opened(generation=3)) as desk:
        await desk.turn()
        desk.post(opened(prompt=[9, 9], generation=generation))
        desk.post(cancels=[TextName("r", generation if generation < 3 else 2)])
        await desk.run()
    assert desk.text() == plain()
    assert {verdict.generation for verdict in desk.verdicts["r"]} == {3}
    assert not desk.refusals["r"]


async def test_a_cancel_of_a_newer_generation_ends_an_older_text():
    """Its own cancel may have been lost."""
    async with desk_of(opened()) as desk:
        await desk.turn()
        desk.post(cancels=[TextName("r", 9)])
        await desk.run()
    assert len(desk.text()) == 1
    assert len(desk.target.texts) == 0


async def test_a_refused_successor_leaves_the_text_as_it_is():
    async with desk_of(opened()) as desk:
        await desk.turn()
        desk.post(opened(generation=2, prefix_hash=1))
        await desk.run()
    assert desk.text() == plain()
    assert [refusal.generation for refusal in desk.refusals["r"]] == [2]


async def test_texts_beyond_the_targets_seats_are_refused_for_the_moment():
    async with desk_of(*(opened(f"r{number}") for number in range(5)), max_texts=3) as desk:
        await desk.run()
        assert [name for name in desk.refusals if desk.refusals[name]] == ["r3", "r4"]
        (refusal,) = desk.refusals["r4"]
        assert refusal.code == CapacityError.code
        assert "3 texts run here for this coordinator" in refusal.message
        desk.post(opened("r4", generation=2))
        await desk.run()
    assert desk.text("r4") == plain()


async def test_coordinators_share_the_seats():
    async with steps(max_texts=5) as target:
        first = target.connect()
        assert target.streams.seats == 5
        first.post(*(opened(f"r{number}") for number in range(4)))
        await target.turn()
        second = target.connect()
        assert target.streams.seats == 3
        # What runs goes on, though it is more than a share.
        first.post(opened("more"))
        second.post(*(opened(f"r{number}") for number in range(4)))
        await target.turn()
        assert [len(target.texts.of(desk.stream)) for desk in (first, second)] == [4, 3]
        assert first.refusals["more"]
        assert second.refusals["r3"]
        first.post(opened("r0", [6, 6], generation=2))  # in the place of another of its own
        await target.turn()
        assert not first.refusals["r0"]
        second.leave()
        await target.turn()
        assert target.streams.seats == 5
    shares = [
        [frame.load.seats for frame in desk.frames if frame.load is not None]
        for desk in (first, second)
    ]
    assert shares == [[5, 3, 5], [3]]


async def test_a_target_without_a_limit_takes_any_number():
    async with desk_of(*(opened(f"r{number}") for number in range(100)), max_texts=0) as desk:
        await desk.turn()
    assert len(desk.target.texts) == 100


async def test_a_class_that_is_none_changes_nothing():
    async with desk_of(residents=[resident(GreedyOracle())], budget="adaptive") as desk:
        odd = opened(drafters=("a",), latency_class="urgent")
        desk.post(odd, opened("other", drafters=("a",)))
        await desk.run()
    assert desk.text() == desk.text("other") == plain()


async def test_the_targets_own_limit_of_drafts_holds_whatever_a_text_asks_for():
    desk = await written(
        opened(drafters=("a",), max_draft_tokens=99),
        opened("none", drafters=("a",), max_draft_tokens=-4),
        residents=[resident(GreedyOracle(100))],
        max_draft_tokens=3,
    )
    assert max(verdict.num_nodes for verdict in desk.verdicts["r"]) == 3
    assert max(verdict.num_nodes for verdict in desk.verdicts["none"]) == 0
    assert desk.text() == desk.text("none") == plain()


CONTEXT = [2, *plain([2])[:1]]
RIGHT = TokenTree.chain(plain([2])[1:4])
MISFITS: dict[str, PoolTree] = {
    "of another text": pool_tree(CONTEXT, RIGHT, name="s"),
    "of an older owner": pool_tree(CONTEXT, RIGHT, generation=0),
    "of a newer owner": pool_tree(CONTEXT, RIGHT, generation=2),
    "with another hash": pool_tree(CONTEXT, RIGHT, prefix_hash=7),
    "before the text": pool_tree(CONTEXT, RIGHT, base_len=0, prefix_hash=0),
    "behind the text": pool_tree([*CONTEXT, *plain([2])[1:3]], RIGHT),
    "with nodes of nobody": pool_tree(CONTEXT, RIGHT, [1, 0, 1]),
    "with nodes of somebody unknown": pool_tree(CONTEXT, RIGHT, [1, 2, 1]),
    "with less sources": pool_tree(CONTEXT, RIGHT, [1, 1]),
    "with more survivals": pool_tree(CONTEXT, RIGHT, survival=np.full(4, 0.5, np.float32)),
    "with broken survivals": pool_tree(CONTEXT, RIGHT, survival=np.full(3, np.nan, np.float32)),
    "with a foreign token": pool_tree(CONTEXT, TokenTree.chain([VOCAB_SIZE])),
    "with a loop": pool_tree(CONTEXT, TokenTree.of([1, 2], [1, 0])),
}


@pytest.mark.parametrize("misfit", [*MISFITS.values(), None], ids=[*MISFITS, "none"])
async def test_a_pool_tree_that_does_not_fit_is_dropped_without_an_answer(
    misfit: PoolTree | None,
):
    engine = ToyEngine(runs_ahead=False)
    async with desk_of(opened(prompt=[2], drafters=("p",)), engine=engine) as desk:
        await desk.turn()
        desk.post(trees=[misfit or pool_tree([2], TokenTree.chain(plain([2])[:4]))])
        await desk.turn()
        assert desk.verdicts["r"][1].num_nodes == (3 if misfit is None else 0)
        await desk.run()
    assert desk.text() == plain([2])
    assert not any(desk.refusals.values())


@pytest.mark.parametrize("ahead", [0, 1])
async def test_a_pool_tree_that_was_overtaken_is_dropped(ahead: int):
    """And one that comes while a step runs ahead is verified by the step behind it."""
    text, engine = plain(), ToyEngine(runs_ahead=ahead > 0)
    async with desk_of(opened(drafters=("p",)), engine=engine) as desk:
        for _ in range(3):
            await desk.turn()
        newer = pool_tree([*PROMPT, *text[:3]], TokenTree.chain(text[3:6]))
        older = pool_tree([*PROMPT, *text[:2]], TokenTree.chain(text[2:9]))
        desk.post(trees=[newer])
        desk.post(trees=[older])
        for _ in range(1 + ahead):
            await desk.turn()
    assert [each.num_nodes for each in desk.verdicts["r"][3:]] == [[3], [0, 2]][ahead]
    assert engine.num_ahead == 2 * ahead


# Where a text ends: it says it alone, whatever a step has drawn at once.


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def cut(
    tokens: list[int], num_output: int, remaining: int, stop_ids: tuple[int, ...], min_tokens: int
) -> tuple[int, FinishReason | None]:
    """What a text of so many output tokens, which may have so many more, keeps of a step's."""
    params = SamplingParams(
        stop_token_ids=stop_ids, min_tokens=min_tokens, max_tokens=num_output + remaining
    )
    written = opened("r", params=params, written=[0] * num_output)
    return TargetText("r", written).ending(token_array(tokens))


@pytest.mark.parametrize(
    ("tokens", "num_output", "remaining", "stop_ids", "min_tokens", "expected"),
    [
        ([5, 6], 0, 9, (), 0, (2, None)),
        ([5, 6, 7], 0, 2, (), 0, (2, LENGTH)),
        ([2], 0, 9, (2,), 0, (0, STOP)),
        ([5, 3, 2], 0, 9, (2, 3), 0, (1, STOP)),
        # An end token that may not stand yet is a token like any other.
        ([2, 5, 2], 0, 9, (2,), 1, (2, STOP)),
        ([2, 2, 2], 3, 9, (2,), 5, (2, STOP)),
        ([2, 2], 0, 9, (2,), 2, (2, None)),
        # The limit comes first: an end token behind it was never part of the text.
        ([5, 2], 0, 1, (2,), 0, (1, LENGTH)),
        ([5, 2], 0, 2, (2,), 0, (1, STOP)),
    ],
)
def test_a_step_is_cut_where_the_text_ends(
    tokens: list[int],
    num_output: int,
    remaining: int,
    stop_ids: tuple[int, ...],
    min_tokens: int,
    expected: tuple[int, FinishReason | None],
):
    assert cut(tokens, num_output, remaining, stop_ids, min_tokens) == expected
