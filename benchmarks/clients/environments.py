"""Creates an environment for each client if it is missing or has other versions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.clients.plan import Client

_INSTALL_S = 600.0
_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q")
_NPM = ("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts")
_ERRORS = ("ERROR", "npm error")


class Unavailable(Exception):
    """The client cannot be run here; the message says why."""


class Environments:
    """The clients' environments below `root`.  vllm: the interpreter of an existing environment."""

    def __init__(self, root: Path, vllm: Path | None) -> None:
        self._root = root
        self._vllm = vllm

    def bin(self, client: Client) -> Path:
        """The folder with the client's commands; raises Unavailable with the reason."""
        if not client.requirements:
            if self._vllm is None:
                raise Unavailable("no environment is named; --vllm PYTHON")
            return self._vllm.absolute().parent
        return self.folder(client.name, client.requirements) / "bin"

    def folder(self, name: str, requirements: Sequence[str], *, is_of_npm: bool = False) -> Path:
        """The folder in which the requirements are installed; raises Unavailable."""
        folder = self._root / name
        stamp = folder / "requirements.json"
        wanted = json.dumps(requirements)
        if not stamp.exists() or stamp.read_text("utf-8") != wanted:
            print(f"installing {' '.join(requirements)}", file=sys.stderr, flush=True)
            if is_of_npm:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                # Scripts of installations fetch what is not in the registry.
                _install([*_NPM, "--prefix", str(folder), *requirements])
            else:
                venv.create(folder, clear=True, with_pip=True)
                _install([str(folder / "bin" / "python"), *_PIP, *requirements])
            stamp.write_text(wanted, "utf-8")
        return folder


def version(folder: Path, package: str) -> str:
    """The version of `package` in the environment of a `bin` folder."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run(
        [folder / "python", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip() or "?"


def _install(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
    except FileNotFoundError:
        raise Unavailable(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"its installation took more than {_INSTALL_S:g} s") from None
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith(_ERRORS)]
        raise Unavailable(f"it cannot be installed: {errors[-1] if errors else done.returncode}")
