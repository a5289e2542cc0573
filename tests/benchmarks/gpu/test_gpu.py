"""The GPU benchmark runs to its end on a machine with little else, whatever fails on its way."""

import json
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import PARTS, Part, Record, _received, main
from benchmarks.gpu.kernels import Problem, attention_row, between_row, draw_row
from benchmarks.gpu.part import Setting
from benchmarks.support.record import ROOT
from cluster.core import SamplingParams
from cluster.engine.attention.sdpa import SdpaBackend
from tests.conftest import command
from tests.support.benchmarks.bare_card.sitecustomize import KILLED, WRONG
from tests.support.choices import IS_NIGHT

CPU = torch.device("cpu")
BARE_CARD = ROOT / "tests" / "support" / "benchmarks" / "bare_card"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `benchmarks/gpu/run.sh --tiny` leaves where two of its parts are broken."""
    if not IS_NIGHT:
        pytest.skip("asked by night")
    folder = tmp_path_factory.mktemp("gpu")
    process = command(
        "benchmarks/gpu/run.sh",
        "--tiny",
        "--out",
        folder,
        PYTHON=sys.executable,
        PYTHONPATH=str(BARE_CARD),
        BARE_CARD_RECORD=str(folder / "cpu.json"),
    )
    assert process.returncode == 1, process.stderr
    return folder


@pytest.fixture(scope="module")
def parts(out: Path) -> dict[str, Any]:
    found = json.loads((out / "cpu.json").read_text("utf-8"))
    assert found["tiny"]
    return found["parts"]


def test_all_parts_but_the_broken_ones_are_measured(parts: dict[str, Any]):
    assert list(parts) == [part.name for part in PARTS]
    failed = {name: part["failed"] for name, part in parts.items() if "failed" in part}
    assert list(failed) == [KILLED, WRONG], failed
    assert all(part["rows"] for name, part in parts.items() if name not in failed)
    rows = [row for part in parts.values() for row in part["rows"]]
    assert {row["equal_to_graphs"] for row in rows if "equal_to_graphs" in row} == {1.0}
    assert all(
        0 < row["short distance"] < row["short bound"] for row in rows if "short bound" in row
    )
    assert "synthetic, 0.75 a level" in [row.get("acceptance") for row in rows]


def test_what_a_broken_part_said_is_recorded(parts: dict[str, Any], out: Path):
    assert parts[KILLED]["failed"] == "its process ended by SIGSEGV"
    assert parts[WRONG]["failed"] == "its process ended with status 1"
    assert parts[WRONG]["log"][-1] == "OSError: this part is broken"
    page = (out / "cpu.md").read_text("utf-8")
    assert "these figures say nothing about speed" in page
    assert "OSError: this part is broken" in page


def test_the_record_is_written_before_the_next_part_begins(out: Path):
    before = json.loads((out / "cpu.before").read_text("utf-8"))["parts"]
    names = [part.name for part in PARTS]
    assert list(before) == names[: names.index(KILLED)]
    assert all(part["rows"] and "seconds" in part for part in before.values())


def test_a_part_has_its_time_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours, theirs = Pipe(duplex=False)
    theirs.send({"batch": 1})
    assert list(_received(ours, time.monotonic() + 0.1)) == [{"batch": 1}]
    record = Record(tmp_path, tiny=True)
    monkeypatch.setattr("benchmarks.gpu.__main__._BUDGET_S", 5.0)
    record.run(Part("plain", 60.0), tiny=True)
    written = json.loads(record.path.read_text("utf-8"))
    assert written["parts"] == {"plain": {"rows": [], "failed": "no time was left"}}


def test_a_kernel_that_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Wrong(SdpaBackend):
        def plan(self, batch: Any, scratch_slot: int) -> Any:
            return self

        def attend(self, query: torch.Tensor, *_: object) -> torch.Tensor:
            return query.transpose(0, 1)

    arguments = Problem(2, 20, 3), Setting(True, tmp_path), 1e9
    monkeypatch.setattr("benchmarks.gpu.kernels.create_backend", lambda *_: SdpaBackend())
    assert "failed" not in attention_row(*arguments)
    monkeypatch.setattr("benchmarks.gpu.kernels.create_backend", lambda *_: Wrong())
    assert "differs from the reference" in attention_row(*arguments)["failed"]


def test_a_kernel_of_layers_that_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def product(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    arguments = "silu_product", 3, Setting(True, tmp_path), 1e9
    monkeypatch.setattr("cluster.engine.fused.kernels.silu_product", product)
    assert "failed" not in between_row(*arguments)
    monkeypatch.setattr("cluster.engine.fused.kernels.silu_product", lambda rows: rows[:, :128])
    assert "differs from the reference" in between_row(*arguments)["failed"]


def test_a_draw_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch):
    def wrong(logits: torch.Tensor, *_: object) -> torch.Tensor:
        return logits.argmin(dim=1)

    monkeypatch.setattr("cluster.engine.draw.triton.create_draw", lambda *_: wrong)
    row = draw_row(3, 500, CPU, SamplingParams(0.8))
    assert row["failed"] == "3 tokens are others than the reference's"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_full_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err
