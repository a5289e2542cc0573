"""The GPU benchmark and the tests of kernels and targets by the versions of a card, on a CPU.

    python -m tests.support.card build/card

Makes the environment in that folder.  What cannot be had of the versions is told, and what runs in
its place; where there is no environment at all, that is told and nothing has failed.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Of a machine with an H200 and CUDA's own packages; no pin of ours.
_PYTHON, _TORCH = "3.12", "2.11.0"
_OTHERS = ("transformers==5.17.0", "triton==3.6.0", "huggingface_hub==1.33.0", "tokenizers==0.23.2")
# Triton 3.6's interpreter takes an array of one number for a number, which NumPy 2.4 does not.
_ANY = (
    "numpy<2.4 accelerate safetensors jinja2 psutil pyyaml tqdm prometheus-client scipy hypothesis "
    "pytest pytest-asyncio pytest-rerunfailures pytest-xdist"
)
_TESTS = (
    "draft/heads/test_mtp.py engine/test_interpreted.py engine/attention engine/draw engine/graphs "
    "engine/loading/test_self_check.py engine/loading/test_architectures.py "
    "engine/loading/test_parts_of_text.py engine/loading/test_refusals.py"
)


def make(folder: Path) -> Path | None:
    """The environment's Python, None where it cannot be made."""
    wanted = next(filter(_runs, _pythons()), None)
    if wanted is None:
        _say(f"Python {_PYTHON} is not here")
    for base in filter(None, (wanted, sys.executable)):
        python = folder / Path(base).resolve().name / "bin" / "python"
        if not python.exists():
            subprocess.run([base, "-m", "venv", str(python.parents[1])], check=True)
        if _has_torch(python, has_own=base == sys.executable):
            break
    else:
        _say("no build of torch can be installed: skipped")
        return None
    if not _installs(python, [*_OTHERS, *_ANY.split()]):
        _say(f"{', '.join(_OTHERS)} cannot be installed: skipped")
        return None
    return python


def _pythons() -> list[str]:
    """Where the wanted Python may be."""
    own = Path.home().glob(f".pyenv/versions/{_PYTHON}.*/bin/python{_PYTHON}")
    return [f"python{_PYTHON}", *map(str, own)]


def _runs(python: str) -> bool:
    with suppress(OSError):
        command = [python, "-c", "import venv"]
        return not subprocess.run(command, check=False, capture_output=True).returncode
    return False


def _has_torch(python: Path, *, has_own: bool) -> bool:
    """Install the first build of torch that is to be had; has_own: or that of this environment.

    A build for CUDA takes gigabytes, so it is for those who ask for it by CARD_CUDA=1."""
    index = os.environ.get("TORCH_CPU_INDEX")
    if _installs(python, [f"torch=={_TORCH}+cpu", *(["--index-url", index] if index else [])]):
        return True
    if os.environ.get("CARD_CUDA") == "1" and _installs(python, [f"torch=={_TORCH}"]):
        return True
    _say(
        f"torch {_TORCH} cannot be had for {python.parents[1].name} as a build for CPUs "
        "(TORCH_CPU_INDEX names an index that has it, CARD_CUDA=1 takes the one for CUDA)"
    )
    own = version("torch")
    if not has_own or not _installs(python, [f"torch=={own}"]):
        return False
    _say(f"torch {own} is used")
    return True


def _installs(python: Path, words: Iterable[str]) -> bool:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return not subprocess.run([*command, *words], check=False, capture_output=True).returncode


def _say(line: str) -> None:
    sys.stdout.write(f"the versions of a machine with a GPU: {line}\n")
    sys.stdout.flush()


def main() -> int:
    folder = Path(sys.argv[1])
    python = make(folder)
    if python is None:
        return 0
    out, tests = str(folder / "record"), [f"tests/{each}" for each in _TESTS.split()]
    status = 0
    for words in (["benchmarks.gpu", "--tiny", "--out", out], ["pytest", *tests]):
        status |= subprocess.run([str(python), "-m", *words], cwd=ROOT, check=False).returncode
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
