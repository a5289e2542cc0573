"""What the configuration's words for devices and formats mean on a machine.

A GPU that torch does not see is refused with both versions, as is a Triton without a compiler.

The machines are folders and little programs.
"""

from pathlib import Path

import pytest
import torch

from cluster.engine import device
from cluster.engine.device import (
    MachinePaths,
    check_can_compile,
    resolve_device,
    resolve_dtype,
    unseen_gpu,
    warn_of_emulation,
    warn_of_hidden_gpu,
)
from cluster.errors import ConfigError
from tests.support.errors import config_error

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees this machine's GPU")


def machine(
    folder: Path,
    *,
    smi: str = "",
    driver: str = "",
    device: bool = True,
    cuda: str | None = None,
    **environment: str,
) -> MachinePaths:
    """A machine with these files.  smi: the body of its nvidia-smi, a shell script."""
    folder.mkdir(exist_ok=True)
    if device:
        (folder / "nvidia0").touch()
    if driver:
        (folder / "version").write_text(driver)
    program = folder / "nvidia-smi"
    if smi:
        program.write_text(f"#!/bin/sh\n{smi}\n")
        program.chmod(0o755)
    return MachinePaths(
        folder / "nvidia0", folder / "version", str(program), folder / "include", environment, cuda
    )


SMI = 'echo "550.54.15"'
MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"


@no_gpu
@pytest.mark.parametrize(
    ("has", "version"),
    [
        ({"smi": SMI}, "550.54.15"),
        ({"smi": SMI, "device": False}, "550.54.15"),  # as in Windows' Linux
        ({"driver": MODULE}, "535.104.05"),
        ({"driver": MODULE, "smi": "exit 9"}, "535.104.05"),
        ({}, "unknown"),
    ],
)
def test_auto_is_refused_with_both_versions_where_torch_sees_no_gpu(
    has: dict[str, str], version: str, tmp_path: Path
):
    with pytest.raises(ConfigError) as caught:
        resolve_device("auto", machine(tmp_path, cuda="12.8", **has))
    assert caught.value.param == "device"
    for word in (f"driver {version}", "CUDA 12.8", torch.__version__, "device: cpu"):
        assert word in caught.value.message


@no_gpu
def test_a_gpu_that_was_asked_for_by_name_is_refused_as_well(tmp_path: Path):
    with config_error("built without CUDA; install a build with it"):
        resolve_device("auto", machine(tmp_path, smi=SMI))
    with config_error(r"cuda:1 does not exist: .*driver 550\.54\.15.*12\.8"):
        resolve_device("cuda:1", machine(tmp_path, smi=SMI, cuda="12.8"))


@no_gpu
def test_without_a_gpu_auto_is_the_cpu(tmp_path: Path):
    """An image may have the program and no device: then it fails or says nothing."""
    for smi in ("", "exit 9", "exit 0"):
        bare = machine(tmp_path, smi=smi, device=False)
        assert resolve_device("auto", bare) == torch.device("cpu")
        assert unseen_gpu(bare) is None


@no_gpu
@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_gpu_that_is_hidden_on_purpose_is_not_refused_but_said(
    visible: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    hiding = machine(tmp_path, smi=SMI, CUDA_VISIBLE_DEVICES=visible)
    assert resolve_device("auto", hiding).type == "cpu"
    warn_of_hidden_gpu(hiding)
    warn_of_hidden_gpu(machine(tmp_path, CUDA_VISIBLE_DEVICES="0"))
    assert ["CUDA_VISIBLE_DEVICES" in line for line in caplog.messages] == [True]


def building(folder: Path, *, compiler: str, headers: bool, **environment: str) -> MachinePaths:
    """A machine with that compiler in its only folder of programs."""
    for name in ("bin", "include"):
        (folder / name).mkdir()
    if compiler:
        (folder / "bin" / compiler).write_text("#!/bin/sh\n")
        (folder / "bin" / compiler).chmod(0o755)
    if headers:
        (folder / "include" / "Python.h").touch()
    return machine(folder, PATH=str(folder / "bin"), **environment)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_triton_needs_a_compiler_and_headers_and_no_more(compiler: str, tmp_path: Path):
    check_can_compile(building(tmp_path, compiler=compiler, headers=True))


@pytest.mark.parametrize(
    ("compiler", "headers", "environment", "missing", "packages"),
    [
        ("", True, {}, "a C compiler here", "apt install gcc)"),
        ("gcc", False, {}, "Python.h", "apt install python3-dev)"),
        ("", False, {}, "a C compiler and Python's headers", "apt install gcc python3-dev)"),
        ("gcc", True, {"CC": "icx"}, "a C compiler here", "attention: sdpa"),
    ],
)
def test_what_triton_lacks_is_named_with_the_package(
    compiler: str,
    headers: bool,
    environment: dict[str, str],
    missing: str,
    packages: str,
    tmp_path: Path,
):
    with pytest.raises(ConfigError) as caught:
        check_can_compile(building(tmp_path, compiler=compiler, headers=headers, **environment))
    assert caught.value.param == "attention"
    assert missing in caught.value.message
    assert packages in caught.value.message


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("flag", "best", "warned"),
    [("avx512_bf16", torch.bfloat16, []), ("avx2", torch.float32, [True])],
)
def test_a_format_that_is_emulated_is_not_auto_and_at_its_word_taken_with_a_warning(
    flag: str,
    best: torch.dtype,
    warned: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset({flag}))
    assert resolve_dtype("auto", CPU, torch.bfloat16) == best
    assert resolve_dtype("auto", CPU, None) is None
    assert resolve_dtype("auto", torch.device("cuda"), torch.bfloat16) == torch.bfloat16
    assert resolve_dtype("bfloat16", CPU, torch.bfloat16) is torch.bfloat16
    assert resolve_dtype("float32", CPU, torch.bfloat16) is torch.float32
    warn_of_emulation(torch.bfloat16)
    warn_of_emulation(torch.float32)
    assert ["dtype bfloat16 is emulated" in line for line in caplog.messages] == warned
