"""Audits at the target: a fault of the engine that has changed a text is seen."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.core import SamplingParams
from cluster.engine.engine import Engine
from cluster.engine.work import Output
from cluster.requests.fields import Redraw
from tests.support.choices import by_day
from tests.support.engine.adapters import write_adapter
from tests.support.engine.driver import load_engine, prompt
from tests.support.worker.steps import Steps, steps
from tests.support.worker.texts import opened

NUM_TEXTS = by_day(6, 42)
SEEDS = range(by_day(2, 20))
MAX_TEXTS = 50
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=12)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
# What a fault does to the engine, before each step of a text.
Fault = Callable[[Engine, np.random.Generator], None]


@pytest.fixture(scope="module")
def engine(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    adapter = write_adapter(llama_folder, tmp_path_factory.mktemp("adapters") / "a", seed=1)
    return load_engine(llama_folder, adapters={"a": str(adapter)})


async def write(
    target: Steps,
    name: str,
    params: SamplingParams,
    before: Callable[[], None] = lambda: None,
    **fields: object,
) -> list[int]:
    """Let the target write a text; returns its output."""
    desk = target.connect()
    desk.post(opened(name, prompt(10, seed=params.noise_key).tolist(), params, **fields))
    await target.turn()
    while target.loop.has_work:
        before()
        await target.turn()
    return desk.text(name)


async def audit(
    target: Steps, *asked: tuple[str, SamplingParams, Sequence[int]], **fields: object
) -> list[Redraw]:
    """The redraws of texts that are audited together: name, parameters and output of each."""
    desk = target.connect()
    for name, params, output in asked:
        given = replace(params, forced_ids=tuple(output), max_tokens=len(output))
        tokens = prompt(10, seed=params.noise_key).tolist()
        desk.post(opened(name, tokens, given, is_audit=True, tenant=name.encode(), **fields))
    await target.run()
    assert [desk.text(name) for name, _, _ in asked] == [list(output) for _, _, output in asked]
    return [each for name, _, _ in asked for said in desk.verdicts[name] for each in said.redraws]


def wrong_row(engine: Engine, generator: np.random.Generator) -> None:
    """The logits of one row are those of nobody."""
    real = type(engine).step

    def step(taps: Sequence[int] = ()) -> list[Output]:
        del engine.step  # type: ignore[method-assign]
        outputs = real(engine, taps)
        for output in outputs:
            if output.logits is not None:
                with torch.inference_mode():
                    output.logits[-1] = torch.randn(engine.vocab_size)
        return outputs

    engine.step = step  # type: ignore[method-assign]


def stale_page(engine: Engine, generator: np.random.Generator) -> None:
    """A page of a text holds what another position had."""
    for sequence in engine.page_owners.sequences.values():
        pages = sequence.tables[0].pages
        if len(pages) > 1:
            size = engine.cache.page_size
            source, place = (int(each) for each in generator.choice(len(pages), 2, replace=False))
            first, others = (size * pages[each] for each in (source, place))
            engine.cache.move(0, range(first, first + size), range(others, others + size))


def one_of(turns: Iterator[int], at: int, act: Callable[[], None]) -> None:
    """Act at one of the turns."""
    if next(turns) == at:
        act()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_texts_are_drawn_again_token_by_token(engine: Engine, params: SamplingParams):
    async with steps(engine, max_rows=64) as target:
        for seed in range(NUM_TEXTS):
            own = replace(params, seed=seed, frequency_penalty=0.5 * (seed % 2))
            adapter = "a" * (seed % 3 == 0)
            output = await write(target, f"r{seed}", own, adapter=adapter)
            assert await audit(target, (f"a{seed}", own, output), adapter=adapter) == []


async def test_a_redraw_is_as_far_from_being_drawn_beside_others_as_alone(engine: Engine):
    async with steps(engine, max_rows=64) as target:
        alone, asked = [], []
        for seed in range(3):
            params = replace(SAMPLED, seed=seed, logit_bias=((3, 9.0),))
            *output, last = await write(target, f"r{seed}", params)
            asked.append((f"b{seed}", params, [*output, (last + 1) % engine.vocab_size]))
            alone += await audit(target, asked[-1])
        for found, expected in zip(await audit(target, *asked), alone, strict=True):
            assert found == replace(expected, gap=pytest.approx(expected.gap, abs=1e-3))


@pytest.mark.parametrize(
    ("fault", "adapter"),
    [(wrong_row, ""), (stale_page, ""), (lambda *_: None, "a")],
    ids=["wrong row", "stale page", "swapped adapter"],
)
async def test_a_fault_of_one_step_is_found(engine: Engine, fault: Fault, adapter: str):
    """adapter: of the audit; nobody has asked for one."""
    async with steps(engine, max_rows=64) as target:
        for seed in SEEDS:
            generator = np.random.default_rng(seed)
            for number in range(MAX_TEXTS):
                params = replace(SAMPLED, seed=1000 * seed + number)
                harm, at = partial(fault, engine, generator), int(generator.integers(0, 4))
                before = partial(one_of, iter(range(100)), at, harm)
                output = await write(target, f"r{number}", params, before)
                if await audit(target, (f"a{number}", params, output), adapter=adapter):
                    break
            else:
                pytest.fail(f"seed {seed}: no audit has seen it")
            engine.forget_prefixes()
