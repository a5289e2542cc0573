"""Creates an environment for each client if it is missing or has other versions."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.clients.plan import Client

_INSTALL_S = 600.0


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
        folder = self._root / client.name
        stamp = folder / "requirements.json"
        wanted = json.dumps(client.requirements)
        if not stamp.exists() or stamp.read_text("utf-8") != wanted:
            print(f"installing {' '.join(client.requirements)}", file=sys.stderr, flush=True)
            venv.create(folder, clear=True, with_pip=True)
            _install(folder, client)
            stamp.write_text(wanted, "utf-8")
        return folder / "bin"


def version(folder: Path, package: str) -> str:
    """The version of `package` in the environment of a `bin` folder."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run(
        [folder / "python", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip() or "?"


def _install(folder: Path, client: Client) -> None:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    try:
        done = subprocess.run(
            [*pip, "install", "-q", *client.requirements],
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"its installation took more than {_INSTALL_S:g} s") from None
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable(f"it cannot be installed: {errors[-1] if errors else done.returncode}")
