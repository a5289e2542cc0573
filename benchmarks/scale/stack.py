"""Starts a null target, coordinators and an ingress, each a process of its own, without Ray."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.support.processes import PinnedProcess, free_ports
from cluster.records import frozen

MODEL = "paced"
_CONFIG = """
applications:
- name: null
  args:
    model_name: {model}
    target: {{engine: {{model: models/demo-target}}}}
    drafters: {{suffix: {{kind: suffix, placement: {{with: target}}}}}}
    http: {{port: {http_port}}}
    grpc: {{port: {grpc_port}}}
    coordinator: {{max_running_sequences: 4096}}
    {more}
"""


@frozen
class Plan:
    """period_ms: between two steps.  is_drafted: a step emits three tokens of a text, not one.

    more: of the configuration.  cores: of all processes."""

    num_coordinators: int = 1
    period_ms: float = 40.0
    is_drafted: bool = False
    more: str = ""
    cores: tuple[int, ...] = (0, 1)


@frozen
class Stack:
    """The running processes and the ingress' ports."""

    ingress: PinnedProcess
    coordinators: tuple[PinnedProcess, ...]
    http_port: int
    grpc_port: int


@contextlib.contextmanager
def running(plan: Plan) -> Iterator[Stack]:
    """Run the processes until the end of the block."""
    processes: list[PinnedProcess] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        http_port, grpc_port = free_ports(2)
        config = root / "null.yaml"
        config.write_text(
            _CONFIG.format(model=MODEL, http_port=http_port, grpc_port=grpc_port, more=plan.more),
            "utf-8",
        )

        def start(*words: str) -> tuple[PinnedProcess, str]:
            log = root / f"{len(processes)}.log"
            process = PinnedProcess([sys.executable, "-m", *words], plan.cores, log)
            processes.append(process)
            return process, process.ready_address()

        try:
            _, target = start(
                "benchmarks.scale.paced_target",
                "--period-ms",
                str(plan.period_ms),
                *(["--drafted"] if plan.is_drafted else []),
            )
            lead = ("benchmarks.scale.lead", str(config), "--target", target)
            leads = [start(*lead, "--log-level", "WARNING") for _ in range(plan.num_coordinators)]
            chosen = [word for _, address in leads for word in ("--coordinator", address)]
            ingress, _ = start("benchmarks.scale.ingress_process", str(config), *chosen)
            yield Stack(ingress, tuple(lead for lead, _ in leads), http_port, grpc_port)
        finally:
            for process in reversed(processes):
                process.stop()
