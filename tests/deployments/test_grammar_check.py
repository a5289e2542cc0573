"""A client's grammar is compiled where it can be ended, before anything is queued for it."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator

import psutil
import pytest

from cluster.config.schema import AnswersConfig
from cluster.errors import CapacityError
from cluster.requests.fields import GrammarSpec
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.prompts import GrammarCheck
from deployments.supervisor import is_living
from tests.support.errors import request_error
from tests.support.grammar.specs import FOLDER, SPECS

ONE, OTHER = b"one", b"other"
BRIEF_S = 0.05

MakeCheck = Callable[..., GrammarCheck]


def large(number: int) -> GrammarSpec:
    """A grammar that takes a quarter of a second and fifty megabytes; each is another one."""
    inner = {f"q{index}": {"type": "string"} for index in range(30)}
    outer = {f"p{index}": {"type": "object", "properties": inner} for index in range(250)}
    return GrammarSpec("json_schema", json.dumps({"properties": outer, "title": str(number)}))


def children() -> set[psutil.Process]:
    return {each for each in psutil.Process().children() if is_living(each)}


@pytest.fixture
def make() -> Iterator[MakeCheck]:
    made: list[GrammarCheck] = []

    def create(**settings: float) -> GrammarCheck:
        config = AnswersConfig(**settings)
        made.append(GrammarCheck(Tokenizer.load(FOLDER), config))
        return made[-1]

    yield create
    for check in made:
        check.close()


async def test_one_process_checks_every_kind_and_its_verdicts_outlive_it(make: MakeCheck):
    before = children()
    check = make()
    await check.check(None, ONE)
    assert children() == before
    await asyncio.gather(*(check.check(spec, ONE) for spec in SPECS.values()))
    assert len(children() - before) == 1
    for _ in range(2):
        with request_error("the grammar cannot be used", "grammar"):
            await check.check(GrammarSpec("regex", "(a"), ONE)
    # A client that leaves takes nobody's verdict.
    leaving, staying = (asyncio.create_task(check.check(large(0), ONE)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    await staying
    assert leaving.cancelled()
    check.close()
    await check.check(SPECS["regex"], ONE)
    assert children() == before


WIDE = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(2500)}}


@pytest.mark.parametrize(
    ("settings", "grammar", "reason"),
    [
        ({"max_grammar_bytes": 100}, GrammarSpec("regex", "a" * 101), "has 101 bytes"),
        # It compiles, and has too many ways to go on from its first token.
        (
            {"grammar_timeout_s": 60},
            GrammarSpec("json_schema", json.dumps(WIDE)),
            r"it is too large: .*max is 2000",
        ),
        (
            {"grammar_memory_bytes": 2**24},
            large(0),
            r"and 16777216 bytes of .*grammar_memory_bytes",
        ),
    ],
)
async def test_a_grammar_that_is_too_much_is_refused_and_the_next_one_is_not(
    make: MakeCheck, settings: dict[str, float], grammar: GrammarSpec, reason: str
):
    check = make(**settings)
    with request_error(reason, "grammar"):
        await check.check(grammar, ONE)
    await check.check(GrammarSpec("regex", "small"), ONE)


async def test_grammars_that_take_too_long_are_ended_and_others_are_not(make: MakeCheck):
    check = make(grammar_timeout_s=BRIEF_S)
    await check.check(GrammarSpec("regex", "loaded"), OTHER)
    stuck = [asyncio.create_task(check.check(large(number), ONE)) for number in range(8)]
    await asyncio.sleep(0)
    await check.check(GrammarSpec("regex", "short"), OTHER)
    assert not all(task.done() for task in stuck)
    await check.check(GrammarSpec("regex", "behind them"), ONE)
    for task in stuck:
        with request_error(r"not compiled within 0\.05 s .*grammar_timeout_s"):
            await task


async def test_one_tenants_grammars_are_bounded_and_others_do_not_notice(make: MakeCheck):
    check = make(max_grammars_in_flight=2)
    waiting = [asyncio.create_task(check.check(large(number), ONE)) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(CapacityError, match="2 grammars of yours wait") as caught:
        await check.check(GrammarSpec("regex", "third"), ONE)
    assert caught.value.param == "grammar"
    await check.check(large(0), OTHER)  # the same one, which is compiled already
    await check.check(GrammarSpec("regex", "third"), OTHER)
    await asyncio.gather(*waiting)
    await check.check(GrammarSpec("regex", "third"), ONE)


async def test_a_process_that_ended_is_started_anew(make: MakeCheck):
    before = children()
    check = make()
    await check.check(GrammarSpec("regex", "a"), ONE)
    (first,) = children() - before
    os.kill(first.pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, first.pid, 0)
    await check.check(GrammarSpec("regex", "b"), ONE)
    assert len(children() - before) == 1
