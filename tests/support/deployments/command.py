"""`drafthouse serve` as a process, and a configuration that it serves within seconds."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import yaml

from deployments.readiness import is_wanted
from deployments.supervisor import is_living
from tests.conftest import REPOSITORY, serve_file
from tests.deployments.conftest import DEADLINE_S, free_ports, wait_until
from tests.support.deployments.api import MODEL, Json
from tests.support.deployments.shares import BEFORE_OTHERS, LIKE_OTHERS, share

FACES = ("http", "grpc", "dashboard")


def write_config(long_folder: Path, folder: Path) -> Path:
    """A tiny target and a drafter that needs no model, on ports of its own."""
    engine = {"model": str(long_folder), "device": "cpu", "threads": 1, "num_pages": 64}
    arguments = {
        "model_name": MODEL,
        "target": {"engine": engine},
        "drafters": {"lookup": {"kind": "prompt_lookup"}},
        **on_free_ports(),
    }
    return serve_file(folder, arguments, name="cli")


def on_free_ports() -> Json:
    """The sections of what listens."""
    return {face: {"port": port} for face, port in zip(FACES, free_ports(3), strict=True)}


def ports(config_file: Path) -> list[int]:
    """Of HTTP, of our own gRPC and of the dashboard."""
    arguments = yaml.safe_load(config_file.read_text())["applications"][0]["args"]
    return [arguments[face]["port"] for face in FACES]


class Command:
    """`drafthouse serve` in a process group of its own, with its output in files."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.stdout = folder / "stdout"
        self.stderr = folder / "stderr"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self._starts = True
        # Not that of the Ray which other tests have started in this process.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        with self.stdout.open("w") as out, self.stderr.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deployments.cli", "serve", *arguments],
                cwd=REPOSITORY,
                env={**inherited, "TMPDIR": str(self.temporary), **environment},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait_for(self, text: str) -> None:
        """What is waited for first is said once its Ray runs: until then it goes before others."""

        def said() -> bool:
            assert self.process.poll() is None, self.stderr.read_text()
            if self._starts:  # the session that has its Ray is not there from the first
                share(self.process.pid, BEFORE_OTHERS)
            return text in self.stdout.read_text() + self.stderr.read_text()

        wait_until(said)
        self._starts = False
        share(self.process.pid, LIKE_OTHERS)

    def family(self) -> list[int]:
        """The processes below the command."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [each.pid for each in below if is_living(each)]

    def temporary_folder(self) -> Path:
        """Where its Ray lives, as the raylet was told."""
        for pid in self.family():
            found = re.search(
                r"/tmp/drafthouse-\w{8}", Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace")
            )
            if found:
                return Path(found.group())
        raise AssertionError("no process names its folder")

    def check_end(self, whom: str) -> None:
        """End it by a signal to `whom`; nothing of it is left behind.

        To the first process alone, as Kubernetes signals it, to the group, as a terminal and
        `timeout` do, to every process, as systemd does; to the first one with SIGKILL, as a kernel
        without memory does."""
        family, folder, first = self.family(), self.temporary_folder(), self.process.pid
        number = signal.SIGKILL if whom == "the first, to die at once" else signal.SIGTERM
        if whom == "the group":
            os.killpg(first, number)
        for pid in (first, *family) if whom == "every process" else (first,):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        assert self.process.wait(DEADLINE_S) == (0 if number == signal.SIGTERM else -number)
        if whom == "the first":  # it waits for the others
            assert not [pid for pid in family if running(pid)]
        wait_until(lambda: not any(map(running, family)) and not folder.exists(), 60.0)
        assert list(self.temporary.iterdir()) == []

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)

    def end(self) -> None:
        """Stop it, if it still runs."""
        if self.process.poll() is None:
            self.stop(signal.SIGTERM)

    def said_by_others(self) -> list[str]:
        """The lines on its stderr that are neither its own nor of its replicas' logs: Ray's."""
        text = self.stderr.read_text()
        own, _, _ = text.partition("Try it, in another terminal:")
        rest = text.rpartition("with drafts and without\n")[2]
        lines = own.splitlines() + rest.splitlines()
        own_lines = ("drafthouse: ", "Or open http")
        return [line for line in lines if not line.startswith(own_lines) and not is_wanted(line)]


def running(pid: int) -> bool:
    try:
        return is_living(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False
