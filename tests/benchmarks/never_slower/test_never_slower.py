"""Ratios of pairs and their bars, turns of plain and rival, and continuing an interrupted run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.never_slower.__main__ import cells_of, setup_of
from benchmarks.never_slower.drafters import RandomDrafter, SleepingDrafter
from benchmarks.never_slower.figures import Cell, summarise
from benchmarks.never_slower.report import markdown
from benchmarks.never_slower.runs import PlainAndRival, PromptSets, elapsed_s, measure
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
from cluster.spec.interval import Interval

_LAWS = {"greedy": Law.parse("greedy")}


def pairs(*found: float) -> list[dict[str, Any]]:
    """Whole runs give smaller ratios than the rates: fewer requests run at their end."""
    return [
        {
            "plain_s": 10.0,
            "ours_s": 10.0,
            "plain_rate": 1.0,
            "ours_rate": ratio,
        }
        for ratio in found
    ]


def grid(**cells: list[dict[str, Any]]) -> dict[str, Any]:
    """normal_4=... is the cell normal/code/greedy/4."""
    return {
        f"{name.rsplit('_', 1)[0].replace('_', '-')}/code/greedy/{name.rsplit('_', 1)[1]}": found
        for name, found in cells.items()
    }


def test_an_interval_uses_students_t() -> None:
    # Mean 2, deviation 1, t = 4.303 for two degrees of freedom.
    interval = Interval.of([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.low == pytest.approx(2.0 - 4.303 / 3**0.5)
    assert interval.high == pytest.approx(2.0 + 4.303 / 3**0.5)
    assert Interval.of([2.0]) == Interval(2.0, None, None, 1)


def test_many_pairs_have_no_narrower_an_interval_than_they_should() -> None:
    interval = Interval.of([0.0, 2.0] * 100)
    assert interval.low is not None
    assert 1.96 / 200**0.5 < 1.0 - interval.low < 2.1 / 200**0.5


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
) -> None:
    assert summarise(grid(random_1=pairs(*found)))["failures"] == failures


def test_a_stacks_mean_varies_by_what_pairs_of_one_cell_differ_in() -> None:
    cells = grid(random_1=pairs(4.0, 4.0), random_4=pairs(1.0, 1.0))
    (stack,) = summarise(cells)["stacks"]
    assert (stack["mean"], stack["low"], stack["count"]) == pytest.approx((2.0, 2.0, 4))


def test_the_control_may_be_slow() -> None:
    assert summarise(grid(control_1=pairs(0.5, 0.5)))["failures"] == []


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


def test_every_cell_gets_its_pairs_and_who_goes_first_alternates(tmp_path: Path) -> None:
    diary: list[str] = []
    record = run(tmp_path / "n.json", diary)
    assert list(map(len, record.results.values())) == [3] * 4
    for found in record.results.values():
        assert [pair["first"] for pair in found] == ["plain", "ours", "plain"]
        assert [pair["plain_s"] / pair["ours_s"] for pair in found] == pytest.approx([2.0] * 3)
        assert all(pair["differing_answers"] == 0 for pair in found)
    # Two turns of two stacks, of two systems each.
    assert sum(line.startswith("start") for line in diary) == 8
    assert sum(line.startswith("stop") for line in diary) == 8


def test_a_resumed_run_measures_what_is_missing_only(tmp_path: Path) -> None:
    path = tmp_path / "n.json"
    run(path, [])
    raw = path.with_suffix(".raw.json")
    document = json.loads(raw.read_text())
    document["results"]["sleeper/code/greedy/4"].pop()
    raw.write_text(json.dumps(document))
    diary: list[str] = []
    record = run(path, diary)
    assert list(map(len, record.results.values())) == [3] * 4
    assert [line for line in diary if line.endswith(" 100")] == ["run plain 100", "run sleeper 100"]
    assert not any("normal" in line for line in diary)
    diary.clear()
    run(path, diary)
    assert diary == []


def test_more_pairs_are_added_to_those_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "n.json"
    before = run(path, []).results["normal/code/greedy/1"]
    after = run(path, [], pairs=5).results["normal/code/greedy/1"]
    assert after[:3] == before
    assert len(after) == 5


def test_a_stack_that_is_known_well_enough_gets_no_further_pairs(tmp_path: Path) -> None:
    record = run(tmp_path / "n.json", [], until=0.02, pairs=6)
    assert list(map(len, record.results.values())) == [2] * 4


def test_a_failed_stack_is_recorded_and_the_others_continue(tmp_path: Path) -> None:
    diary: list[str] = []
    record = run(tmp_path / "n.json", diary, failing="normal")
    assert record.failures == {"normal": "out of order"}
    assert len(record.results["sleeper/code/greedy/1"]) == 3
    assert diary.count("stop normal") == diary.count("start normal") == 1


def test_a_report_has_a_table_per_stack_and_says_what_is_below_the_bar(tmp_path: Path) -> None:
    record = run(tmp_path / "n.json", [])
    document = record.publish(summarise(record.results))
    text = markdown(document)
    assert "Every measured cell meets its bar." in text
    assert text.count("| code | greedy | 2.00 (2.00 to 2.00) | 2.00 (2.00 to 2.00) |") == 2
    slow = grid(random_1=pairs(0.9, 0.9))
    document["summary"] = summarise(record.results | slow)
    text = markdown(document)
    assert "Below the bar, or not surely above it: random, random/code/greedy/1." in text
    assert "**0.90 (0.90 to 0.90)**" in text


def test_a_process_that_is_paused_stands_still_until_it_is_resumed(tmp_path: Path) -> None:
    echo = [sys.executable, "-u", "-c", "while True: print(input())"]
    process = PinnedProcess(echo, sorted(os.sched_getaffinity(0)), tmp_path / "echo.log")
    process.write_line("one")
    assert process.read_line() == "one"
    process.pause()
    used_s = process.cpu_s()
    process.write_line("two")
    assert process.cpu_s() == used_s
    process.resume()
    assert process.read_line() == "two"
    process.stop()
    process.resume()  # it is gone, which is no error


def test_the_time_is_from_the_first_submission_to_the_last_token() -> None:
    first = Answer(1.0, ((2.0, 1), (3.0, 5)), (1,))
    second = Answer(1.5, ((4.0, 1), (9.0, 5)), (1,))
    assert elapsed_s(Result((first, second))) == 8.0


def test_cells_are_chosen_by_patterns() -> None:
    found = cells_of(settings(), ["normal", "control"], "normal/prose/*,*/random/greedy/4")
    assert [cell.key for cell in found] == [
        "normal/prose/greedy/1",
        "normal/prose/greedy/4",
        "normal/random/greedy/4",
        "control/random/greedy/4",
    ]
    assert [Cell.of(cell.key) for cell in found] == found
    with pytest.raises(ValueError, match="no cell fits"):
        cells_of(settings(), ["normal"], "prose")


def test_no_two_pairs_share_a_random_prompt() -> None:
    shelf = PromptSets(settings(laws=["greedy", "t1"]), None)
    seen: set[tuple[int, ...]] = set()
    count = 0
    for number in range(3):
        for law in ("greedy", "t1"):
            for level in (1, 4):
                asked = shelf.prompts("random", law, level, number)
                assert len(asked) == 4
                count += len(asked)
                seen.update(prompt.token_ids for prompt in asked)
    assert len(seen) == count
    assert max(max(ids) for ids in seen) < 512


@pytest.mark.parametrize("stack", ["normal", "random", "pool-sleeper", "control"])
def test_stacks_are_configurations_of_the_product(stack: str, tmp_path: Path) -> None:
    setup = setup_of(stack, settings(model="models/demo-target"), tmp_path)
    config = load(setup.config, setup.overrides).config
    assert set(setup.drafters) <= set(config.drafters)
    assert bool(setup.drafters) is (stack != "control")
    assert set(setup.drafters) <= set(config.pool) or stack != "pool-sleeper"
    assert config.coordinator.budget == "adaptive"
    assert setup_of(stack, settings(), tmp_path, plain=True).drafters == ()


@pytest.mark.parametrize("stack", ["normal", "random"])
def test_the_target_may_have_cores_of_its_own_and_the_drafters_the_others(
    stack: str, tmp_path: Path
) -> None:
    settled = settings(cores=[0, 1], target_cores=[0], config="configs/pool.yaml")
    setup = setup_of(stack, settled, tmp_path)
    assert (setup.target_cores, setup.cores) == ((0,), (1,))
    config = load(setup.config, setup.overrides).config
    assert config.target.engine.threads == 1
    assert set(setup.drafters) <= set(config.pool)
    assert config.drafters[setup.drafters[0]].placement.cores == (1,)


@pytest.mark.parametrize("kind", [RandomDrafter, SleepingDrafter])
def test_the_useless_drafters_follow_the_protocol(kind: type[RandomDrafter]) -> None:
    location = f"benchmarks.never_slower.drafters:{kind.__name__}"
    options: dict[str, Any] = {"vocab_size": 64}
    if kind is SleepingDrafter:
        options["sleep_s"] = 0.0
    drafter = create("x", DrafterConfig(location, options), DrafterContext("x", 8, 4))
    assert isinstance(drafter, kind)
    text = token_array([40 + index for index in range(20)])
    recording = Recording(token_array([1, 2, 3]), text, SamplingParams(max_tokens=20))
    stats = replay(drafter, recording, max_nodes=6)
    assert stats.num_draft_tokens >= 6 * 15
    assert stats.num_accepted <= 5
