"""Drafters inside the target worker: they save steps, cost bounded time, and change no text."""

import asyncio
import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster import metrics
from cluster.config.schema import Config, EngineConfig
from cluster.core import EMPTY_FLOATS, EMPTY_TREE, Proposal, SamplingParams, token_array
from cluster.draft.base import Drafter, DrafterContext, DraftTask
from cluster.draft.suffix import NgramCacheOptions, SuffixDrafter, SuffixOptions
from cluster.models.fingerprint import NO_MODEL, ModelVersion
from cluster.rpc.messages import StepReport
from cluster.worker.priority import freeze_gc
from cluster.worker.residents import Residents
from cluster.worker.target import TargetWorker
from cluster.worker.target_parts import TargetParts, load_target_engine
from tests.support.clock import FakeClock
from tests.support.draft.inside import config_of
from tests.support.engine.driver import prompt
from tests.support.engine.slowed import SLOW, slow_down
from tests.support.worker.draft_peer import CountingDrafter, extension, opening, peer_of
from tests.support.worker.residents import LONG_STEP, GreedyOracle, drafted, resident, resident_text
from tests.support.worker.stage import NOBODY, parts_around, stage, worker_of
from tests.support.worker.steps import desk_of, steps, written
from tests.support.worker.texts import GREEDY, LAWS, opened, plain
from tests.support.worker.toy_engine import ToyEngine


@LAWS
@pytest.mark.parametrize("budget", ["fixed", "adaptive"])
async def test_residents_change_no_text(params: SamplingParams, budget: str):
    drafters: dict[str, Drafter] = {
        "a": GreedyOracle(),
        "suffix": SuffixDrafter(DrafterContext("suffix", 16, 64), SuffixOptions()),
        "ngram": SuffixDrafter(DrafterContext("ngram", 16, 64), NgramCacheOptions()),
    }
    prompts = [[i, i + 1, 7, i, i + 1] for i in range(6)]
    own = [replace(params, max_tokens=20 + 7 * i) for i in range(6)]
    opens = [opened(f"r{i}", prompts[i], own[i], drafters=tuple(drafters)) for i in range(6)]
    async with stage(worker_of(drafters, budget=budget)) as built:
        assert await built.connect().written(*opens) == list(map(plain, prompts, own))


async def test_a_short_answer_is_drafted_for_from_its_first_step():
    async with desk_of(
        opened(params=replace(GREEDY, max_tokens=8), drafters=("a",)),
        residents=[resident(GreedyOracle(16))],
    ) as desk:
        # The prompt's step brings a token, and the next one all others at once.
        assert await desk.run() == 2
    assert [len(verdict.sources) for verdict in desk.verdicts["r"]] == [0, 6]
    assert desk.text() == plain()[:8]


@pytest.mark.parametrize(
    "fields",
    [
        {"params": replace(GREEDY, max_tokens=2)},
        {"max_draft_tokens": 0},
        {"params": SamplingParams(forced_ids=tuple(range(30)), max_tokens=30, logprobs=0)},
    ],
    ids=["the last token", "no speculation", "a given output"],
)
async def test_nobody_drafts_where_no_draft_can_be_of_use(fields: dict[str, Any]):
    oracle = GreedyOracle(16)
    desk = await written(
        opened(drafters=("a",), **fields), residents=[resident(oracle)], max_rows=16
    )
    params = fields.get("params", GREEDY)
    assert desk.text() == ([*params.forced_ids] or plain(params=params))
    assert (oracle.commits, oracle.tasks) == ([], [])


async def test_only_the_drafters_that_a_text_names_are_asked():
    chosen, other = GreedyOracle(), GreedyOracle(name="b")
    residents = [resident(chosen), resident(other, "b")]
    await written(opened(drafters=("elsewhere", "a")), residents=residents)
    assert chosen.tasks
    assert (other.commits, other.tasks) == ([], [])


async def test_what_a_drafter_holds_is_released_with_its_text():
    oracle = GreedyOracle()
    async with desk_of(
        opened(drafters=("a",)), opened("s", drafters=("a",)), residents=[resident(oracle)]
    ) as desk:
        await desk.turn()
        assert desk.target.told(metrics.DRAFTER_REQUESTS) == {("a", "w"): 2.0}
        await desk.run()
        assert desk.target.told(metrics.DRAFTER_REQUESTS) == {("a", "w"): 0.0}
    assert sorted(oracle.released) == ["1/r", "1/s"]
    assert not list(oracle._requests)


async def test_what_is_asked_of_residents_and_what_they_take_is_counted():
    oracle = GreedyOracle(2)
    async with steps(residents=[resident(oracle)]) as target:
        target.connect().post(opened(drafters=("a",), task="code", tenant=b"t"))
        await target.run()
        asked, took_s = target.told(metrics.DRAFT_DEMAND), target.told(metrics.DRAFT_TIME)
        assert target.told(metrics.DRAFT_DEMAND) == asked  # none is counted twice
    assert asked.keys() == {("a", "code")}
    assert asked["a", "code"] > 100
    assert took_s["a",] > 0.0
    first = oracle.commits[0]
    told = first.request_id, first.generation, first.prompt_len, first.task, first.tenant
    assert (*told, first.params) == ("1/r", 1, 3, "code", b"t", GREEDY)


def test_a_drafter_that_another_one_replaces_frees_all_that_it_holds():
    former, later = GreedyOracle(), GreedyOracle()
    residents = Residents([resident(former)])
    residents.draft([resident_text(name="r"), resident_text(name="s")], LONG_STEP)
    held = resident(later)
    assert residents.exchange(held).name == "a"
    assert list(residents) == [held]
    assert sorted(former.released) == ["r", "s"]
    residents.draft([resident_text(name="r")], LONG_STEP)
    assert [each.request_id for each in later.tasks] == ["r"]


async def test_a_drafter_that_is_replaced_does_not_end_in_the_engines_thread():
    former, ended_in = GreedyOracle(), []
    weakref.finalize(former, lambda: ended_in.append(threading.current_thread().name))
    worker = worker_of({"a": former})
    del former
    async with stage(worker) as built:
        await asyncio.to_thread(worker.take_up, Config(), [resident(GreedyOracle())])
        assert await built.connect().written(opened(drafters=("a",))) == [plain()]
    assert ended_in != ["target-engine"]
    assert len(ended_in) == 1


@pytest.mark.parametrize("model", [ModelVersion("a hash"), NO_MODEL], ids=["model", "look-up"])
async def test_a_model_that_is_replaced_is_freed_though_it_was_excluded_from_collections(
    model: ModelVersion,
):
    former = GreedyOracle()
    former.circle = former  # drafters with models are in some
    held = weakref.ref(former)
    residents = Residents([resident(former)])
    next(iter(residents)).model = model
    del former
    later = [resident(GreedyOracle())]
    worker = TargetWorker(parts_around(ToyEngine(), residents), Config(), NOBODY)
    async with stage(worker):
        freeze_gc()
        try:
            await asyncio.to_thread(worker.take_up, Config(), later)
            # A collection stops the process: only a model is worth that.
            assert (held() is None) is (model != NO_MODEL)
        finally:
            gc.unfreeze()


# When a resident hears of a text, and when it is asked for a tree.


class LookUp(GreedyOracle):
    is_look_up = True


def test_a_look_up_that_is_asked_for_nothing_hears_of_a_text_now_and_then():
    oracle = LookUp()
    drafter = resident(oracle, clock=FakeClock())
    kept = resident_text(draft_nodes=0)
    for token in range(200):
        kept.tokens.append(token_array([token % 32]))
        assert drafter.draft([kept], 0.01, 1000.01) == ([], False)
    lengths = [commit.base_len + len(commit.token_ids) for commit in oracle.commits]
    assert lengths == [64, 128, 192]
    assert oracle.tasks == []


def test_a_model_reads_a_text_when_it_is_first_asked_and_says_so():
    oracle = GreedyOracle()
    drafter = resident(oracle, clock=FakeClock())
    kept = resident_text(range(100))
    kept.asked = frozenset()
    assert drafter.draft([kept], 0.01, 1000.01) == ([], False)
    assert oracle.commits == []
    kept.asked = frozenset("a")
    trees = drafted(drafter, kept, now=1000.0)
    assert len(oracle.commits) == len(trees) == 1
    assert drafter.turn.num_read == 1
    kept.tokens.append(token_array([7]))
    drafted(drafter, kept, now=1000.0)
    assert drafter.turn.num_read == 0
    kept.asked = frozenset()
    kept.tokens.append(token_array([7] * 100))
    assert drafter.draft([kept], 0.01, 1000.01) == ([], False)
    assert len(oracle.commits) == 2


def test_each_resident_of_a_target_is_asked_by_its_name():
    oracles = {name: GreedyOracle(name=name) for name in "abc"}
    drafters = [resident(each, name, clock=FakeClock()) for name, each in oracles.items()]
    residents = Residents(drafters, FakeClock())
    kept = resident_text()
    kept.asked = frozenset("ac")
    found = residents.draft([kept], LONG_STEP)
    assert {drafter.name for drafter, _ in found.trees} == {"a", "c"}
    assert [(turn.drafter, turn.num_sequences, turn.num_nodes) for turn in found.turns] == [
        ("a", 1, 4),
        ("c", 1, 4),
    ]
    assert oracles["b"].commits == []


# How long a draft model reads at a time beside texts in decoding, on a slow machine.


# After a chunk of the target's own, which took as long as it may.
CHUNK_S = EngineConfig().max_chunk_s
AFTER_A_CHUNK = StepReport(step_time_s=CHUNK_S, num_prefill_tokens=20)
# As long as texts wait for residents after it, where a plain step takes less.
BOUND_S = 0.05
NUM_ROWS = 330


def test_a_draft_model_reads_a_prompt_in_chunks_that_time_bounds(
    llama_folder: Path, draft_folder: Path
):
    model = {"model": str(draft_folder), "device": "cpu", "dtype": "float32", "num_pages": 256}
    config = config_of(llama_folder, "lm", options={"engine": model}, max_batch_tokens=512)
    config = replace(config, drafters={"a": config.drafters["head"]})
    target = load_target_engine(config)
    residents = TargetParts(target, config).residents
    (lm,) = residents
    clock = residents._clock = lm._clock = slow_down(lm.engine, SLOW)
    text = resident_text(prompt(NUM_ROWS).tolist(), name="r")
    waits = []
    while not waits or lm.engine.cached_len("r") < NUM_ROWS - 1:
        clock.now += 1000.0  # so long does it rest after its first chunk, which stalls
        began = clock.now
        residents.draft([text], AFTER_A_CHUNK)
        waits.append(clock.now - began)
        assert len(waits) < 100
    # Its engine has measured nothing before the first, which is bounded in rows.
    assert max(waits[1:]) <= BOUND_S + CHUNK_S
    assert sum(waits) > SLOW[1] * NUM_ROWS
    target.close()


# What workers say of themselves to those who decide how many of them there should be.


class GatedDrafter(CountingDrafter):
    """Has nothing to offer while the gate is closed, and says that more may come."""

    def __init__(self) -> None:
        super().__init__(slices=10**9)
        self.gate = threading.Event()

    def _proposal(self, task: DraftTask) -> Proposal:
        found = super()._proposal(task)
        if self.gate.is_set():
            return found
        return replace(found, tree=EMPTY_TREE, survival=EMPTY_FLOATS)


async def test_a_commit_is_late_if_no_tree_came_since_the_last_one():
    drafter = GatedDrafter()
    async with peer_of(drafter, opening("a", [1, 2])) as peer:
        await peer.until(lambda frame: bool(frame.observations))
        await peer.send(extension("a", [1, 2], [3]))
        await peer.until(lambda frame: bool(frame.observations))
        said = peer.house.worker.statistics()
        assert (said["texts"], said["late"]) == (1, 0.5)
        drafter.gate.set()
        await peer.proposal("a")
        await peer.send(extension("a", [1, 2, 3], [4]))
        await peer.until(lambda frame: bool(frame.observations))
        assert peer.house.worker.statistics()["late"] == 0.0
        assert peer.house.worker.statistics()["late"] == 0.0, "nothing has come since"


async def test_a_target_says_how_full_it_is():
    async with stage(worker_of({})) as built:
        assert built.worker.statistics() == {"texts": 0, "places": 64, "kv_use": 0.0}
