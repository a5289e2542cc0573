"""The needs of an NVIDIA GPU beside itself: a torch that sees it, and Triton's tools.

Nothing here needs a GPU, and everything that is asked of the machine is an argument.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

import torch

from cluster.errors import ConfigError
from cluster.records import frozen

_PATIENCE_S = 20.0
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)?")
# An empty list of GPUs hides them all.
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# As Triton looks for them.
_COMPILERS = ("gcc", "clang")


def _include() -> Path:
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme for what pip installs; the headers are the system's.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return Path(sysconfig.get_paths(scheme)["include"])


@frozen
class MachinePaths:
    """The places where a machine tells what it has; the defaults are this machine's.

    device, driver: files that NVIDIA's driver makes.  smi: its program, by name or path.  include:
    the folder of Python's headers.  cuda: the version of CUDA that torch was built with, None = it
    was built for CPUs.
    """

    device: Path = Path("/dev/nvidia0")
    driver: Path = Path("/proc/driver/nvidia/version")
    smi: str = "nvidia-smi"
    include: Path = field(default_factory=_include)
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    cuda: str | None = torch.version.cuda

    @property
    def hides_gpus(self) -> bool:
        """True if this process is not to see any, as Ray has it for actors that reserve none."""
        return self.environment.get(_VISIBLE, "0").strip() in ("", "-1", "NoDevFiles")

    def driver_version(self) -> str | None:
        """The version of the driver of the machine's NVIDIA GPU, "unknown" where it says none; None
        without such a GPU."""
        said = self._asked()
        if said is None and not self.device.exists():
            return None
        for text in (said or "", self._driver_file()):
            found = _VERSION.search(text)
            if found is not None:
                return found[0]
        return "unknown"

    def _asked(self) -> str | None:
        """The driver's version by nvidia-smi, None where it knows of no GPU."""
        program = shutil.which(self.smi)
        if program is None:
            return None
        command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            said = subprocess.run(
                command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return said.stdout.strip() or None

    def _driver_file(self) -> str:
        try:
            return self.driver.read_text("utf-8", "replace")
        except OSError:
            return ""

    def compiler(self) -> str | None:
        """The C compiler that Triton would call."""
        wanted, path = self.environment.get("CC"), self.environment.get("PATH")
        names = _COMPILERS if wanted is None else (wanted,)
        return next((each for each in names if shutil.which(each, path=path)), None)


def unseen_gpu(machine: MachinePaths) -> str | None:
    """The words for a GPU that torch does not see, None without one and where it is hidden from
    this process; call where torch sees none."""
    if machine.hides_gpus:
        return None
    version = machine.driver_version()
    if version is None:
        return None
    if machine.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA; install a build with it"
    else:
        reason = (
            f"torch {torch.__version__} is built for CUDA {machine.cuda}, which needs a newer "
            "driver or one that is loaded; update the driver, or install a build for an older CUDA"
        )
    return f"this machine has an NVIDIA GPU (driver {version}), and torch sees none: {reason}"


def check_can_compile(machine: MachinePaths) -> None:
    """Raise ConfigError where Triton could launch no kernel, for it compiles what launches them."""
    missing, packages = [], []
    if machine.compiler() is None:
        missing.append("a C compiler")
        packages.append("gcc")
    if not (machine.include / "Python.h").is_file():
        missing.append(f"Python's headers ({machine.include / 'Python.h'})")
        packages.append("python3-dev")
    if missing:
        raise ConfigError(
            f"attention on an NVIDIA GPU is compiled by Triton, which lacks {' and '.join(missing)}"
            f" here; install them (on Debian and Ubuntu: apt install {' '.join(packages)}), or set "
            "attention: sdpa, which takes about twice as long",
            param="attention",
        )
