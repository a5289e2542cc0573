"""Starts workers by hand, without Ray.

    python -m cluster.worker target CONFIG
    python -m cluster.worker draft CONFIG NAME
    python -m cluster.lead CONFIG --target HOST:PORT --drafter NAME=HOST:PORT

Each prints one line with its address when it is ready, and stops cleanly on SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from cluster import logs
from cluster.config.addresses import free_port
from cluster.config.file import load
from cluster.config.schema import Config
from cluster.draft import registry
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
from cluster.worker.build import follow_target, load_drafter, load_target

# Of `cluster.rpc.server`, for one kind of part.
Serve = Callable[..., Awaitable[RunningServer]]
_RANK_GRACE_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one worker; returns the exit code."""
    arguments = _parser().parse_args(argv)
    return exit_code(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    file = load(arguments.config, arguments.overrides)
    logs.configure(file.config.log_format, LOG_FORMAT, arguments.log_level)
    registry.search_in(Path.cwd(), file.path.parent)
    serve = _target if arguments.role == "target" else _draft
    asyncio.run(serve(file.config, arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster.worker", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    roles = parser.add_subparsers(dest="role", required=True)
    target = roles.add_parser("target", help="serve the target; starts its other ranks as well")
    draft = roles.add_parser("draft", help="serve one drafter")
    for role in (target, draft):
        add_options(role)
    draft.add_argument("name", help="the drafter's name in the configuration")
    return parser


async def _target(config: Config, arguments: argparse.Namespace) -> None:
    leader = f"127.0.0.1:{free_port()}"
    with _ranks(config, leader, arguments.log_level) as ranks:
        worker = await asyncio.to_thread(load_target, config, leader)
        await _serve(worker, serve_target, "target", config, arguments, ranks)


async def _draft(config: Config, arguments: argparse.Namespace) -> None:
    name = arguments.name
    config.check_in_pool(name)
    worker = await asyncio.to_thread(load_drafter, config, name)
    await _serve(worker, serve_drafter, f"drafter {name}", config, arguments)


async def _serve(
    worker: Any,
    serve: Serve,
    title: str,
    config: Config,
    arguments: argparse.Namespace,
    ranks: Sequence[BaseProcess] = (),
) -> None:
    """Start a worker, serve it until a signal comes, and stop it.  ranks: without which it cannot
    serve."""
    worker.start()
    try:
        await serve_until_signal(
            worker,
            serve,
            title,
            config,
            arguments,
            lambda: worker.is_healthy and all(rank.is_alive() for rank in ranks),
        )
    finally:
        await asyncio.to_thread(worker.stop)


async def serve_until_signal(
    part: Any,
    serve: Serve,
    title: str,
    config: Config,
    arguments: argparse.Namespace,
    is_healthy: Callable[[], bool] = lambda: True,
) -> None:
    """Serve a part that was started, where its options say, until a signal comes.

    title: in the line that says where.  Raises as `run_until_signal`."""
    server = await serve(
        part,
        arguments.host,
        arguments.port,
        max_frame_bytes=config.coordinator.max_frame_bytes,
        trust=trust_of(config.data_plane, part.describe().role),
    )
    await run_until_signal(server, title, is_healthy)


@contextmanager
def _ranks(config: Config, leader: str, log_level: str) -> Iterator[Sequence[BaseProcess]]:
    """Ranks 1 and up of a target, as child processes on this machine.

    leader: host:port at which rank 0 gathers the group.  They end after rank 0; those that do not
    are killed."""
    spawn = multiprocessing.get_context("spawn")  # torch runs in no process that was forked
    ranks = [
        spawn.Process(target=_follow, args=(config, rank, leader, log_level))
        for rank in range(1, config.target.engine.tensor_parallel)
    ]
    for each in ranks:
        each.start()
    try:
        yield ranks
    finally:
        for each in ranks:
            each.join(_RANK_GRACE_S)
            each.kill()
            each.join()


def _follow(config: Config, rank: int, leader: str, log_level: str) -> None:
    logs.configure(config.log_format, LOG_FORMAT, log_level)
    sys.exit(exit_code(lambda: follow_target(config, rank, leader)))
