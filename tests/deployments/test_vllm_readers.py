"""What was made for vLLM reads a live server: its benchmark's way with /metrics; and /stats."""

import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from cluster import metrics
from cluster.config.schema import Config, DrafterConfig
from cluster.metrics.recorder import Recorder
from deployments.ingress.api.writer import TIMES, times_schema
from deployments.ingress.metrics_page import stats_of
from tests.support.coordinator.toys import ToyDrafter, oracle_chain
from tests.support.deployments.place import Place, place

PATH = "/v1/completions"
GREEDY = {"max_tokens": 30, "temperature": 0}


def spec_decode(page: str) -> Counter[str]:
    """Add up a page as `vllm bench serve` does: every line whose name begins with
    vllm:spec_decode and ends in _total counts, whatever its labels are."""
    sums = Counter()
    for line in page.splitlines():
        name, _, rest = line.partition("{")
        if not name.startswith("vllm:spec_decode") or not name.endswith("_total"):
            continue
        value = int(float(rest.rpartition(" ")[2]))
        kinds = (
            "num_drafts",
            "num_draft_tokens",
            "num_accepted_tokens_per_pos",
            "num_accepted_tokens",
        )
        kind = next(kind for kind in kinds if kind in name)
        place = re.search(r'position="(\d+)"', rest)
        sums[f"at {place.group(1)}" if place else kind] += value
    return sums


@asynccontextmanager
async def served() -> AsyncIterator[Place]:
    """A toy target with a drafter that guesses right."""
    config = Config(drafters={"a": DrafterConfig(kind="prompt_lookup")})
    async with place(config) as here:
        here.rooms.add_drafter(ToyDrafter("a", oracle_chain()))
        yield here


async def get(here: Place, path: str) -> Any:
    answer = await here.client.get(path)
    assert answer.status_code == 200
    return answer


async def test_the_benchmarks_way_of_adding_up_and_stats_give_what_the_answers_say():
    async with served() as here:
        before = spec_decode((await get(here, "/metrics")).text)
        assert before == Counter(num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0)
        assert set(before) == {"num_drafts", "num_draft_tokens", "num_accepted_tokens"}
        told = Counter()
        for prompt in ("hello", "abc abc"):
            answer = (await here.ask(PATH, **GREEDY, prompt=prompt)).json()
            stats = answer["metrics"]["speculative_decoding"]
            told["num_drafts"] += stats["num_spec_steps"]
            told["num_draft_tokens"] += stats["num_draft_tokens"]
            told["num_accepted_tokens"] += stats["num_accepted_draft_tokens"]
        after = spec_decode((await get(here, "/metrics")).text)
        stats = (await get(here, "/stats")).json()
    assert told["num_accepted_tokens"] > 0
    assert {kind: after[kind] for kind in told} == told
    places = [count for kind, count in after.items() if kind.startswith("at ")]
    assert sum(places) == told["num_accepted_tokens"]
    drafts = stats["spec_decode"]
    assert {kind: drafts[kind] for kind in told} == told
    assert drafts["acceptance_rate"] == told["num_accepted_tokens"] / told["num_draft_tokens"]
    assert drafts["mean_acceptance_length"] == 1 + told["num_accepted_tokens"] / told["num_drafts"]
    assert sum(drafts["num_accepted_tokens_per_pos"]) == told["num_accepted_tokens"]
    assert drafts["by_drafter"]["a"]["num_draft_tokens"] == told["num_draft_tokens"]
    assert drafts["estimated_speedup"] > 0
    assert (stats["requests"]["running"], stats["requests"]["waiting"]) == (0, 0)
    assert stats["missing_processes"] == 0


def test_counts_are_integers_also_where_nothing_was_accepted():
    recorder = Recorder()
    recorder.add(metrics.NUM_DRAFT_TOKENS, 3, drafter="a", task="default")
    found = stats_of(recorder.render(), "toy")
    told, own = found["spec_decode"], found["spec_decode"]["by_drafter"]["a"]
    counts = [
        told["num_drafts"],
        *(each[f"num_{name}_tokens"] for each in (told, own) for name in ("draft", "accepted")),
        *found["tokens"].values(),
    ]
    assert counts == [0, 3, 0, 3, 0, 0, 0, 0]
    assert {type(count) for count in counts} == {int}


async def test_an_answer_says_its_times_as_vllm_does_and_of_several_choices_nothing():
    async with served() as here:
        one, two = [(await here.ask(PATH, n=n)).json()["metrics"] for n in (1, 2)]
    assert list(TIMES) == list(times_schema()) == [name for name in one if name in TIMES]
    assert one["e2e_time_ms"] >= 0.0
    assert one["queue_time_ms"] >= 0.0
    assert one["arrival_time"] > 1e9
    assert {two[name] for name in TIMES} == {None}
