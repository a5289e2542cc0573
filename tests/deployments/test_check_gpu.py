"""`drafthouse check` on a machine with a GPU that torch does not see."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.conftest import Run


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees this machine's GPU")
def test_check_refuses_a_gpu_that_torch_does_not_see(
    llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 550.54.15\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    setting = f"target.engine.model={llama_folder}"
    told = run("check", "configs/own-model.yaml", "--set", setting, status=2)
    assert "target.engine.device: " in told
    assert "driver 550.54.15" in told
    assert torch.__version__ in told
    cpu = "target.engine.device=cpu"
    run("check", "configs/own-model.yaml", "--set", setting, "--set", cpu)
