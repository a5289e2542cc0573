"""Ratios of pairs and their bars, turns of plain and rival, and continuing an interrupted run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.never_slower.__main__ import cells_of, setup_of
from benchmarks.never_slower.drafters import RandomDrafter, SleepingDrafter
from benchmarks.never_slower.figures import summarise
from benchmarks.never_slower.runs import PlainAndRival, measure
from benchmarks.replay.along import Recording, replay
from benchmarks.support.answers import Answer, Law, Result
from benchmarks.support.processes import PinnedProcess
from benchmarks.support.prompts import Prompt
from benchmarks.support.record import Record
from cluster.config.file import load
from cluster.config.schema import DrafterConfig
from cluster.core import SamplingParams, token_array
from cluster.draft.base import DrafterContext
from cluster.draft.registry import create

_LAWS = {"greedy": Law.parse("greedy")}
CELL = "random/code/greedy/1"


def pairs(*found: float) -> list[dict[str, Any]]:
    """Whole runs give smaller ratios than the rates: fewer requests run at their end."""
    times = {"plain_s": 10.0, "ours_s": 10.0, "plain_rate": 1.0}
    return [{**times, "ours_rate": ratio} for ratio in found]


@pytest.mark.parametrize(
    ("found", "failures"),
    [
        ([1.0, 1.01, 0.99, 1.0], []),
        ([0.965, 0.966, 0.965, 0.964], ["random", "random/code/greedy/1"]),  # surely too slow
        ([1.2, 0.8, 1.1, 0.9], ["random"]),  # the mean is good, its bound is not
        ([1.5], ["random"]),  # one pair has no bound
    ],
)
def test_a_stack_is_held_by_its_lower_bound_and_a_cell_by_its_upper_one(
    found: list[float], failures: list[str]
):
    assert summarise({CELL: pairs(*found)})["failures"] == failures


@dataclass
class ToySystem:
    """Takes seconds_per_token; records its calls in a shared list."""

    name: str
    seconds_per_token: float
    diary: list[str]
    fails: bool = False
    processes: dict[str, PinnedProcess] = field(default_factory=dict)

    def start(self) -> None:
        self.diary.append(f"start {self.name}")

    def stop(self) -> None:
        self.diary.append(f"stop {self.name}")

    def run(
        self, prompts: Sequence[Prompt], max_tokens: int, law: Law, concurrency: int, seed: int
    ) -> Result:
        if self.fails:
            raise RuntimeError("out of order")
        self.diary.append(f"run {self.name} {max_tokens}")
        events = ((0.0, 1), (self.seconds_per_token * max_tokens, max_tokens))
        return Result(tuple(Answer(0.0, events, (7,) * max_tokens) for _ in prompts))


class ToyPrompts:
    def prompts(self, kind: str, law: str, concurrency: int, number: int) -> Sequence[Prompt]:
        return [Prompt(kind, "default", (1, 2, number))] * concurrency


def settings(**more: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "config": "configs/tiny.yaml",
        "overrides": [],
        "laws": ["greedy"],
        "concurrency": [1, 4],
        "pairs": 3,
        "until": -1.0,
        "turn": 2,
        "prompts": 4,
        "max_tokens": 100,
        "cores": [0],
        "target_cores": [],
        "vocab_size": 512,
        **more,
    }


def run(path: Path, diary: list[str], failing: str = "", **more: Any) -> Record:
    record = Record(path, settings(**more), free=("pairs", "until"))

    def processes_of(stack: str) -> PlainAndRival:
        plain = ToySystem("plain", 0.02, diary)
        return PlainAndRival(plain, ToySystem(stack, 0.01, diary, fails=stack == failing))

    cells = cells_of(record.settings, ["normal", "sleeper"], "*/code/*")
    measure(record, cells, _LAWS, ToyPrompts(), processes_of)
    return record


def test_every_cell_gets_its_pairs_and_who_goes_first_alternates(tmp_path: Path):
    diary = []
    record = run(tmp_path / "n.json", diary)
    assert list(map(len, record.results.values())) == [3] * 4
    for found in record.results.values():
        assert [pair["first"] for pair in found] == ["plain", "ours", "plain"]
        assert [pair["plain_s"] / pair["ours_s"] for pair in found] == pytest.approx([2.0] * 3)
        assert all(pair["differing_answers"] == 0 for pair in found)
    # Two turns of two stacks, of two systems each.
    assert sum(line.startswith("start") for line in diary) == 8
    assert sum(line.startswith("stop") for line in diary) == 8


def test_a_resumed_run_measures_what_is_missing_only(tmp_path: Path):
    path = tmp_path / "n.json"
    run(path, [])
    raw = path.with_suffix(".raw.json")
    document = json.loads(raw.read_text())
    document["results"]["sleeper/code/greedy/4"].pop()
    raw.write_text(json.dumps(document))
    diary = []
    record = run(path, diary)
    assert list(map(len, record.results.values())) == [3] * 4
    assert [line for line in diary if line.endswith(" 100")] == ["run plain 100", "run sleeper 100"]
    assert not any("normal" in line for line in diary)
    diary.clear()
    run(path, diary)
    assert diary == []


@pytest.mark.parametrize("stack", ["normal", "random", "pool-sleeper", "control"])
def test_stacks_are_configurations_of_the_product(stack: str, tmp_path: Path):
    setup = setup_of(stack, settings(model="models/demo-target"), tmp_path)
    config = load(setup.config, setup.overrides).config
    assert set(setup.drafters) <= set(config.drafters)
    assert bool(setup.drafters) is (stack != "control")
    assert set(setup.drafters) <= set(config.pool) or stack != "pool-sleeper"
    assert config.coordinator.budget == "adaptive"
    assert setup_of(stack, settings(), tmp_path, plain=True).drafters == ()


@pytest.mark.parametrize("kind", [RandomDrafter, SleepingDrafter])
def test_the_useless_drafters_follow_the_protocol(kind: type[RandomDrafter]):
    location = f"benchmarks.never_slower.drafters:{kind.__name__}"
    options = {"vocab_size": 64}
    if kind is SleepingDrafter:
        options["sleep_s"] = 0.0
    drafter = create("x", DrafterConfig(location, options), DrafterContext("x", 8, 4))
    assert isinstance(drafter, kind)
    text = token_array([40 + index for index in range(20)])
    recording = Recording(token_array([1, 2, 3]), text, SamplingParams(max_tokens=20))
    stats = replay(drafter, recording, max_nodes=6)
    assert stats.num_draft_tokens >= 6 * 15
    assert stats.num_accepted <= 5
