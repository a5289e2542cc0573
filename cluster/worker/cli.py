"""Starts workers by hand, without Ray.

    python -m cluster.worker target CONFIG
    python -m cluster.worker draft CONFIG NAME
    python -m cluster.lead CONFIG --target HOST:PORT --drafter NAME=HOST:PORT

Each prints one line with its address when it is ready, and stops cleanly on SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config.file import load
from cluster.config.schema import Config, EngineConfig
from cluster.draft import registry
from cluster.errors import ConfigError, DrafthouseError, NotFoundError
from cluster.rpc.server import serve_drafter, serve_target
from cluster.rpc.standalone import run_until_signal
from cluster.worker.build import build_drafter, build_target
from cluster.worker.priority import freeze_gc, pin_to_cores, shorten_switch_interval

if TYPE_CHECKING:
    from cluster.engine.engine import Engine

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_RANK_GRACE_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one worker; returns the exit code: 0 ended in order, 1 failed, 2 wrongly configured."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=arguments.log_level, format=_LOG_FORMAT, stream=sys.stderr)
    try:
        file = load(arguments.config, arguments.overrides)
        registry.search_in(Path.cwd(), file.path.parent)
        config = file.config
        if arguments.role == "target":
            asyncio.run(_target(config, arguments))
        elif arguments.role == "draft":
            asyncio.run(_draft(config, arguments))
        else:
            _follow(config.target.engine, arguments.rank, arguments.leader)
    except (ConfigError, NotFoundError) as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2
    except DrafthouseError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 1
    except KeyboardInterrupt:  # before the server has taken over the signals
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster.worker", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    roles = parser.add_subparsers(dest="role", required=True)
    target = roles.add_parser("target", help="serve the target; starts its other ranks as well")
    draft = roles.add_parser("draft", help="serve one drafter")
    rank = roles.add_parser("rank", help="one more rank of a tensor-parallel target")
    for role in (target, draft, rank):
        role.add_argument("config", help="a Ray Serve config file, e.g. configs/local.yaml")
        role.add_argument("--set", dest="overrides", action="append", default=[], metavar="K=V")
        role.add_argument("--log-level", default="INFO")
    for role in (target, draft):
        role.add_argument("--host", default="127.0.0.1", help="address to listen on")
        role.add_argument("--port", type=int, default=0, help="0 = a free one")
    draft.add_argument("name", help="the drafter's name in the configuration")
    rank.add_argument("rank", type=int, help="1 .. tensor_parallel - 1")
    rank.add_argument("leader", help="host:port at which rank 0 gathers the group")
    return parser


async def _target(config: Config, arguments: argparse.Namespace) -> None:
    pin_to_cores(config.target.placement.cores)
    ranks = await _start_ranks(config.target.engine, arguments)
    try:
        engine = await asyncio.to_thread(_load, config, ranks.leader)
        worker = build_target(engine, config)
        if config.residents:
            shorten_switch_interval()
        freeze_gc()
        worker.start()
        try:
            server = await serve_target(
                worker, arguments.host, arguments.port,
                max_frame_bytes=config.coordinator.max_frame_bytes,
            )  # fmt: skip
            await run_until_signal(
                server, "target", lambda: worker.healthy and not ranks.any_ended()
            )
        finally:
            await asyncio.to_thread(worker.stop)
            engine.close()
    finally:
        await ranks.stop()


async def _draft(config: Config, arguments: argparse.Namespace) -> None:
    name = arguments.name
    config.check_in_pool(name)
    pin_to_cores(config.drafters[name].reserved.cores)
    # Only kinds with a model of their own need torch.
    engine = getattr(registry.check(name, config.drafters[name]), "engine", None)
    if engine is not None:
        _configure_threads(engine)
    shorten_switch_interval()
    worker = await asyncio.to_thread(build_drafter, config, name)
    freeze_gc()
    worker.start()
    try:
        server = await serve_drafter(
            worker, arguments.host, arguments.port,
            max_frame_bytes=config.coordinator.max_frame_bytes,
        )  # fmt: skip
        await run_until_signal(server, f"drafter {name}", lambda: worker.is_healthy)
    finally:
        await asyncio.to_thread(worker.stop)


def _load(config: Config, leader: str) -> Engine:
    from cluster.engine.parallel import init_rank
    from cluster.worker.host import load_target_engine

    engine = config.target.engine
    _configure_threads(engine)
    if engine.tensor_parallel > 1:
        init_rank(0, engine.tensor_parallel, leader)
    return load_target_engine(config)


def _follow(config: EngineConfig, rank: int, leader: str) -> None:
    from cluster.engine.engine import Engine
    from cluster.engine.parallel import init_rank, leave_group

    _configure_threads(config)
    init_rank(rank, config.tensor_parallel, leader)
    try:
        Engine.load(config).follow()
    finally:
        leave_group()


def _configure_threads(config: EngineConfig) -> None:
    from cluster.engine.cpu.threads import configure_threads

    configure_threads(config)


class _Ranks:
    """Ranks 1 and up of a target, as child processes on this machine."""

    def __init__(self, leader: str, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self.leader = leader
        self._processes = processes

    def any_ended(self) -> bool:
        return any(process.returncode is not None for process in self._processes)

    async def stop(self) -> None:
        """Wait for the ranks to end after rank 0; kill those that do not."""
        for process in self._processes:
            try:
                await asyncio.wait_for(process.wait(), _RANK_GRACE_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _start_ranks(config: EngineConfig, arguments: argparse.Namespace) -> _Ranks:
    leader = f"127.0.0.1:{_free_port()}"
    overrides = [part for override in arguments.overrides for part in ("--set", override)]
    processes = []
    for rank in range(1, config.tensor_parallel):
        place = ["rank", arguments.config, str(rank), leader, "--log-level", arguments.log_level]
        command = [sys.executable, "-m", "cluster.worker", *place, *overrides]
        processes.append(await asyncio.create_subprocess_exec(*command))
    return _Ranks(leader, processes)


def _free_port() -> int:
    """A free port, which torch's rendezvous binds a moment later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
