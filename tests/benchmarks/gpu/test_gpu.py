"""The GPU benchmark runs on a machine without a GPU and writes its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.kernels import Problem, attention_row, draw_row, tolerance
from benchmarks.support.record import ROOT
from tests.support.choices import by_night

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of `benchmarks/gpu/run.sh --tiny`."""
    folder = tmp_path_factory.mktemp("gpu")
    process = subprocess.run(
        [str(ROOT / "benchmarks" / "gpu" / "run.sh"), "--tiny", "--out", str(folder)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    return folder


@pytest.fixture(scope="module")
def report(out: Path) -> dict[str, Any]:
    (path,) = out.glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


@by_night
def test_the_tiny_run_reports_every_part_and_says_that_it_is_tiny(
    out: Path, report: dict[str, Any]
) -> None:
    (model,) = report["models"]
    assert [row["batch"] for row in model["batches"]] == [1, 2]
    assert all(row["plain_tokens_per_s"] > 0 for row in model["batches"])
    assert all(row["eager_tokens_per_s"] > 0 for row in model["batches"])
    assert model["cuda_graphs"] is torch.cuda.is_available()
    assert len(report["kernels"]) == 2
    assert [row["different_tokens"] for row in report["draws"]] == [0]
    (page,) = out.glob("*.md")
    assert "these figures say nothing about speed" in page.read_text("utf-8")
    assert f"| {'yes' if model['cuda_graphs'] else 'no'} |" in page.read_text("utf-8")


@by_night
def test_trees_are_accepted_and_do_not_change_the_text(report: dict[str, Any]) -> None:
    runs = [run for row in report["models"][0]["batches"] for run in row["speculative"]]
    assert all(run["tokens_equal_to_plain"] == 1.0 for run in runs)
    assert all(1.0 < run["tokens_per_round"] <= 4.0 for run in runs)


def test_a_kernel_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def plan(self, batch: Any, scratch_slot: int) -> Any:
            return self

        def attend(self, query: torch.Tensor, *_: object) -> torch.Tensor:
            return query.transpose(0, 1)

    problem = Problem(2, 20, 3)
    assert attention_row(problem, CPU, 1e9)["largest_error"] <= tolerance(CPU)
    monkeypatch.setattr("benchmarks.gpu.kernels.create_backend", lambda name: Wrong())
    assert attention_row(problem, CPU, 1e9)["largest_error"] > tolerance(CPU)


def test_a_draw_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(logits: torch.Tensor, *_: object) -> torch.Tensor:
        return logits.argmin(dim=1)

    assert draw_row(3, 500, CPU)["different_tokens"] == 0
    monkeypatch.setattr("benchmarks.gpu.kernels.fused_draw", lambda *_: wrong)
    assert draw_row(3, 500, CPU)["different_tokens"] == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_full_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err
