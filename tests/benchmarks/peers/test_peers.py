"""One system runs at a time, every cell is measured once, and an interrupted run continues."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.__main__ import measure, within_repository
from benchmarks.peers.makers import Programs
from benchmarks.peers.systems import PeerSettings, Turns, can_run, system_of
from benchmarks.support.answers import Answer, Law, Result
from benchmarks.support.processes import PinnedProcess
from benchmarks.support.prompts import Prompt
from benchmarks.support.record import ROOT, Record

_LAWS = [Law.parse("greedy"), Law.parse("t0.8")]
_ASKED = {level: [Prompt("code", "code", (1, 2, level))] * level for level in (1, 4)}


@dataclass
class ToySystem:
    """Records its calls in a shared list; fails in its `fails_at`-th run."""

    name: str
    diary: list[str]
    fails_at: int = -1
    num_runs: int = 0
    processes: dict[str, PinnedProcess] = field(default_factory=dict)

    def start(self) -> None:
        self.diary.append(f"start {self.name}")

    def stop(self) -> None:
        self.diary.append(f"stop {self.name}")

    def run(
        self, prompts: Sequence[Prompt], max_tokens: int, law: Law, concurrency: int, seed: int
    ) -> Result:
        self.num_runs += 1
        if self.num_runs == self.fails_at:
            raise RuntimeError("its log, in a folder of this machine, says:\nout of order")
        self.diary.append(f"run {self.name}")
        events = ((1.0, 1), (2.0, max_tokens))
        return Result(tuple(Answer(0.0, events, (7,) * max_tokens) for _ in prompts))


def settings(systems: Sequence[str], **more: Any) -> dict[str, Any]:
    return {
        "systems": list(systems), "laws": [law.name for law in _LAWS], "concurrency": [1, 4],
        "repetitions": 2, "max_tokens": 5, **more,
    }  # fmt: skip


def run(path: Path, systems: dict[str, ToySystem], *, keep_running: bool = False) -> Record:
    record = Record(path, settings(list(systems)))
    turns = Turns(systems, keep_running=keep_running)
    measure(record, turns, _ASKED, _LAWS)
    turns.stop_all()
    return record


def toys(*names: str) -> tuple[dict[str, ToySystem], list[str]]:
    diary: list[str] = []
    return {name: ToySystem(name, diary) for name in names}, diary


def test_one_system_at_a_time_is_running(tmp_path: Path) -> None:
    systems, diary = toys("a", "b", "c")
    run(tmp_path / "c.json", systems)
    running = None
    for line in diary:
        what, name = line.split()
        if what == "start":
            assert running is None
            running = name
        assert running == name
        running = None if what == "stop" else running
    assert running is None


def test_every_repetition_gives_every_system_its_turns(tmp_path: Path) -> None:
    systems, diary = toys("a", "b", "c")
    comparison = run(tmp_path / "c.json", systems)
    assert len(comparison.results) == 3 * 2 * 2 * 2
    starts = [line.split()[1] for line in diary if line.startswith("start")]
    # The second repetition starts with the next system.
    assert starts == ["a", "b", "c"] * 2 + ["b", "c", "a"] * 2


def test_a_continued_run_measures_what_is_missing_only(tmp_path: Path) -> None:
    systems, _ = toys("a", "b")
    first = run(tmp_path / "c.json", systems)
    raw = tmp_path / "c.raw.json"
    document = json.loads(raw.read_text())
    del document["results"]["1/t0.8/4/b"]
    raw.write_text(json.dumps(document))
    systems, diary = toys("a", "b")
    again = run(tmp_path / "c.json", systems)
    assert diary == ["start b", "run b", "run b", "stop b"]  # one warms up, one is measured
    assert again.results == first.results


def test_a_failed_system_is_recorded_and_the_others_continue(tmp_path: Path) -> None:
    systems, diary = toys("a", "b")
    systems["a"].fails_at = 3
    comparison = run(tmp_path / "c.json", systems)
    assert comparison.failures == {"a": "out of order"}, "the reason, and nothing of the machine"
    assert sum(key.endswith("/b") for key in comparison.results) == 8
    assert diary.count("start a") == diary.count("stop a") == 1


def test_systems_that_keep_running_start_once_and_are_ended(tmp_path: Path) -> None:
    systems, diary = toys("a", "b")
    run(tmp_path / "c.json", systems, keep_running=True)
    assert sorted(line for line in diary if "run" not in line) == [
        "start a", "start b", "stop a", "stop b"
    ]  # fmt: skip


def peer_settings(tmp_path: Path, vllm_python: str = "") -> PeerSettings:
    return PeerSettings(
        target="models/demo-target", draft="models/demo-draft", dtype="float32", cores=(0,),
        config="configs/tiny.yaml", overrides=(), programs=Programs(vllm=vllm_python),
        max_sequences=4, log=tmp_path,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["ours", "theirs-plain", "vllm-eagle", "transformers-"])
def test_an_unknown_system_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no system"):
        system_of(name, peer_settings(tmp_path, "python"))


def test_a_drafter_that_the_configuration_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no drafter 'lmm'"):
        system_of("ours-lmm", peer_settings(tmp_path))


def test_vllm_needs_an_interpreter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--vllm-python"):
        system_of("vllm-plain@float32", peer_settings(tmp_path))


def test_speculation_in_transformers_is_for_one_sequence() -> None:
    assert can_run("transformers-assisted@float32", 1)
    assert not can_run("transformers-assisted@float32", 4)
    assert can_run("transformers-plain", 4)


def test_a_report_names_what_lies_in_the_repository_without_the_machines_folders() -> None:
    assert within_repository(str(ROOT / "models" / "demo-draft")) == "models/demo-draft"
    assert within_repository("models/demo-draft") == "models/demo-draft"
    assert within_repository("/elsewhere/draft") == "draft"
