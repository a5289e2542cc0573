"""The matrix: every kind of request has the same text and the same log-probabilities with
speculation on and off, greedy and seeded, in float32, and drafts were verified where it was on."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cluster.core import SamplingParams
from cluster.engine.engine import Engine
from cluster.local import LLM, Completion
from cluster.requests.fields import GrammarSpec
from tests.support.grammar.specs import SPECS
from tests.support.matrix import (
    CELLS,
    LAWS,
    LONG,
    PLAIN,
    PROMPTS,
    Cell,
    all_stopped,
    config,
    neighbour,
)

pytestmark = pytest.mark.usefixtures("tireless_residents")

# Sums over a batch of another width differ in their last bits.
_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(config()) as opened:
        yield opened


@pytest.fixture(params=LAWS.values(), ids=LAWS.keys())
def law(request: pytest.FixtureRequest) -> SamplingParams:
    return request.param


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the engines' steps have done since."""
    done = {"hits": 0, "preempted": 0}
    step = Engine.step

    def counted(engine: Engine, taps: Sequence[int] = ()) -> Any:
        outputs = step(engine, taps)
        done["hits"] += engine.last_step.num_prefix_hit_tokens
        done["preempted"] += engine.last_step.num_preempted
        return outputs

    monkeypatch.setattr(Engine, "step", counted)
    return done


def check_equal(drafted: Sequence[Completion], plain: Sequence[Completion]) -> None:
    for one, other in zip(drafted, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert one.finish_reason is other.finish_reason
        for mine, its in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.logprob == pytest.approx(its.logprob, abs=_TOLERANCE)
            assert [value for _, value in mine.top] == pytest.approx(
                [value for _, value in its.top], abs=_TOLERANCE
            )


def compare(ask: Callable[..., list[Completion]]) -> list[Completion]:
    """Ask without and with drafts; returns the texts.

    ask: called with the `speculation` of `LLM.generate`."""
    plain = ask(speculation=PLAIN)
    assert all(one.stats.num_draft_tokens == 0 for one in plain)
    drafted = ask(speculation=None)
    check_equal(drafted, plain)
    # Without drafts the comparison would say nothing.  Accepted and rejected ones count.
    assert sum(one.stats.num_draft_tokens for one in drafted) > 0
    return drafted


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS.keys())
def test_drafts_change_nothing(llm: LLM, cell: Cell, law: SamplingParams):
    params, stop = cell.change(llm, law), cell.stop(llm, law)
    ask = partial(llm.generate, list(cell.prompts), params, stop=stop, ignore_eos=cell.ignore_eos)
    assert cell.holds(compare(ask))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_every_kind_of_grammar_ends_by_itself(llm: LLM, spec: GrammarSpec):
    found = llm.generate(PROMPTS, replace(LAWS["seeded"], grammar=spec, max_tokens=200))
    assert all_stopped(found)
    assert all(one.text for one in found)


def test_drafts_are_accepted_and_rejected(llm: LLM):
    """The matrix would say little of drafts that are all right or all wrong."""
    found = [one for _ in range(3) for one in llm.generate(PROMPTS, LAWS["seeded"])]
    drafted = sum(one.stats.num_draft_tokens for one in found)
    assert 0 < sum(one.stats.num_accepted_draft_tokens for one in found) < drafted


def test_every_drafter_is_asked(llm: LLM):
    """Else the matrix would say nothing of it.  A target tells its scores once a second."""
    deadline, found = time.monotonic() + 120, set[object]()
    while not found >= {"lm", "other", "later", "suffix"}:
        assert time.monotonic() < deadline, found
        llm.generate(PROMPTS, LAWS["greedy"], ignore_eos=True)
        (told,) = llm.status()["targets"]
        found = {row["drafter"] for row in told.get("scores", ()) if row["trees"] > 0}


def test_each_kind_of_request_changes_the_text(llm: LLM):
    """Else a cell would compare the plain law under another name."""
    law = LAWS["seeded"]
    plain = [one.text for one in llm.generate(PROMPTS, law, ignore_eos=True)]
    for name in ("structured output", "strict tools", "logit_bias", "penalties", "stop strings"):
        cell = CELLS[name]
        params, stop = cell.change(llm, law), cell.stop(llm, law)
        found = llm.generate(PROMPTS, params, stop=stop, ignore_eos=cell.ignore_eos)
        assert [one.text for one in found] != plain, name


def test_the_abort_of_a_neighbour(llm: LLM, law: SamplingParams):
    alone = llm.generate(PROMPTS, law, speculation=PLAIN, ignore_eos=True)
    with ThreadPoolExecutor(3) as pool:

        def ask(**how: Any) -> list[Completion]:
            leaving = [
                pool.submit(llm._run, neighbour, llm, law, num_tokens) for num_tokens in (1, 5, 12)
            ]
            found = llm.generate(PROMPTS, law, ignore_eos=True, **how)
            for left, wanted in zip(leaving, (1, 5, 12), strict=True):
                assert wanted <= left.result() < 100, "it was not aborted on its way"
            return found

        check_equal(compare(ask), alone)


def test_preemption(law: SamplingParams, steps: dict[str, int]):
    """192 tokens of cache for requests that come to more than twice as many."""
    prompts = [LONG[: 60 * count] for count in range(2, 8)]
    with LLM(config()) as wide:
        expected = wide.generate(prompts, law, speculation=PLAIN, ignore_eos=True)
    with LLM(config(num_pages=12)) as tight:
        preempted = []

        def ask(**how: Any) -> list[Completion]:
            before = steps["preempted"]
            found = tight.generate(prompts, law, ignore_eos=True, **how)
            preempted.append(steps["preempted"] - before)
            return found

        check_equal(compare(ask), expected)
        assert min(preempted) > 0


def test_a_prefix_hit(llm: LLM, law: SamplingParams, steps: dict[str, int]):
    """A long beginning that another request computed, with its drafts or without."""
    first = f"# {law.temperature}\n" + LONG
    hits = []

    def ask(**how: Any) -> list[Completion]:
        before = steps["hits"]
        found = llm.generate([first, first + "x = ", first[:-20]], law, ignore_eos=True, **how)
        hits.append(steps["hits"] - before)
        return found

    cold = ask(speculation=PLAIN)
    check_equal(compare(ask), cold)
    assert min(hits[1:]) > hits[0]


def test_the_best_of_many(llm: LLM, law: SamplingParams):
    """As `best_of` ranks them: by the mean log-probability of their tokens."""
    ask = partial(llm.generate, [PROMPTS[1]] * 4, law, ignore_eos=True)

    def best(found: Sequence[Completion]) -> list[int]:
        means = [sum(each.logprob for each in one.logprobs) / len(one.logprobs) for one in found]
        return found[means.index(max(means))].token_ids

    assert best(compare(ask)) == best(ask(speculation=PLAIN))
