"""Starts workers by hand, without Ray.

    python -m cluster.worker target CONFIG
    python -m cluster.worker draft CONFIG NAME
    python -m cluster.lead CONFIG --target HOST:PORT --drafter NAME=HOST:PORT

Each prints one line with its address when it is ready, and stops cleanly on SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cluster import logs
from cluster.config.addresses import free_port
from cluster.config.file import load
from cluster.config.schema import Config, EngineConfig
from cluster.draft import registry
from cluster.options import whole
from cluster.rpc.server import (
    LOG_FORMAT,
    RunningServer,
    add_options,
    exit_code,
    run_until_signal,
    serve_drafter,
    serve_target,
)
from cluster.rpc.trust import trust_of
from cluster.worker.build import build_target, follow_target, load_drafter, load_target
from cluster.worker.priority import freeze_gc, shorten_switch_interval

_RANK_GRACE_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one worker; returns the exit code."""
    arguments = _parser().parse_args(argv)
    return exit_code(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    file = load(arguments.config, arguments.overrides)
    logs.configure(file.config.log_format, LOG_FORMAT, arguments.log_level)
    registry.search_in(Path.cwd(), file.path.parent)
    if arguments.role == "target":
        asyncio.run(_target(file.config, arguments))
    elif arguments.role == "draft":
        asyncio.run(_draft(file.config, arguments))
    else:
        follow_target(file.config.target, arguments.rank, arguments.leader)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster.worker", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    roles = parser.add_subparsers(dest="role", required=True)
    target = roles.add_parser("target", help="serve the target; starts its other ranks as well")
    draft = roles.add_parser("draft", help="serve one drafter")
    rank = roles.add_parser("rank", help="one more rank of a tensor-parallel target")
    for role in (target, draft, rank):
        add_options(role, listens=role is not rank)
    draft.add_argument("name", help="the drafter's name in the configuration")
    rank.add_argument("rank", type=whole(), help="1 .. tensor_parallel - 1")
    rank.add_argument("leader", help="host:port at which rank 0 gathers the group")
    return parser


async def _target(config: Config, arguments: argparse.Namespace) -> None:
    leader = f"127.0.0.1:{free_port()}"
    async with _ranks(config.target.engine, leader, arguments) as ranks:
        engine = await asyncio.to_thread(load_target, config, leader)
        worker = build_target(engine, config)
        if config.residents:
            shorten_switch_interval()
        freeze_gc()
        try:
            await _serve(
                worker,
                serve_target,
                "target",
                lambda: worker.healthy and all(rank.returncode is None for rank in ranks),
                config,
                arguments,
            )
        finally:
            engine.close()


async def _draft(config: Config, arguments: argparse.Namespace) -> None:
    name = arguments.name
    config.check_in_pool(name)
    worker = await asyncio.to_thread(load_drafter, config, name)
    told = f"drafter {name}"
    await _serve(worker, serve_drafter, told, lambda: worker.is_healthy, config, arguments)


async def _serve(
    worker: Any,
    serve: Callable[..., Awaitable[RunningServer]],
    role: str,
    is_healthy: Callable[[], bool],
    config: Config,
    arguments: argparse.Namespace,
) -> None:
    """Start a worker, serve it until a signal comes, and stop it."""
    worker.start()
    try:
        server = await serve(
            worker,
            arguments.host,
            arguments.port,
            max_frame_bytes=config.coordinator.max_frame_bytes,
            trust=trust_of(config.data_plane, role.partition(" ")[0]),
        )
        await run_until_signal(server, role, is_healthy)
    finally:
        await asyncio.to_thread(worker.stop)


@asynccontextmanager
async def _ranks(
    config: EngineConfig, leader: str, arguments: argparse.Namespace
) -> AsyncIterator[Sequence[asyncio.subprocess.Process]]:
    """Ranks 1 and up of a target, as child processes on this machine.

    They end after rank 0; those that do not are killed."""
    options = [part for override in arguments.overrides for part in ("--set", override)]
    options += ["--log-level", arguments.log_level]
    ranks: list[asyncio.subprocess.Process] = []
    try:
        for rank in range(1, config.tensor_parallel):
            command = [sys.executable, "-m", "cluster.worker", "rank", arguments.config, str(rank)]
            ranks.append(await asyncio.create_subprocess_exec(*command, leader, *options))
        yield ranks
    finally:
        for process in ranks:
            try:
                await asyncio.wait_for(process.wait(), _RANK_GRACE_S)
            except TimeoutError:
                process.kill()
                await process.wait()
