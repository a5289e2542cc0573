"""Starts workers by hand, without Ray.

    python -m cluster.worker target CONFIG
    python -m cluster.worker draft CONFIG NAME
    python -m cluster.lead CONFIG --target HOST:PORT --drafter NAME=HOST:PORT

Each prints one line with its address when it is ready, and stops cleanly on SIGTERM.
"""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cluster import logs
from cluster.config.file import load
from cluster.config.schema import Config
from cluster.draft import registry
from cluster.errors import ConfigError, DrafthouseError, NotFoundError, WorkerError
from cluster.rpc.link import run_until_first_ends
from cluster.rpc.server import (
    add_options,
    run_until_signal,
    serve_worker,
)
from cluster.rpc.trust import trust_of
from cluster.worker.build import load_drafter, load_target
from cluster.worker.ranks import Ranks, end


def main(argv: Sequence[str] | None = None) -> int:
    """Run one worker; returns the exit code."""
    parser = ArgumentParser(prog="python -m cluster.worker", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    roles = parser.add_subparsers(dest="role", required=True)
    target = roles.add_parser("target", help="serve the target; starts its other ranks as well")
    add_options(target, _target)
    draft = roles.add_parser("draft", help="serve one drafter")
    add_options(draft, _draft)
    draft.add_argument("name", help="the drafter's name in the configuration")
    return run_part(parser, argv)


def run_part(parser: ArgumentParser, argv: Sequence[str] | None) -> int:
    """Run the part that these options name; returns the exit code: 0 ended in order, 1 failed, 2
    wrongly configured."""
    arguments = parser.parse_args(argv)
    try:
        file = load(arguments.config, arguments.overrides)
        logs.configure(file.config.log_format, level=arguments.log_level)
        registry.search_in(Path.cwd(), file.path.parent)
        asyncio.run(arguments.part(file.config, arguments))
    except KeyboardInterrupt:  # before the server has taken over the signals
        return 130
    except DrafthouseError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2 if isinstance(error, (ConfigError, NotFoundError)) else 1
    return 0


async def _target(config: Config, arguments: Namespace) -> None:
    ranks = Ranks(config, arguments.log_level)
    try:
        worker = await ranks.load(partial(load_target, config))
    except WorkerError as error:
        end(error)
    serving = _serve(worker, "target", config, arguments)
    watching = ranks.end_with_them(config.coordinator.target_silence_s)
    try:
        await run_until_first_ends(serving, watching)
    finally:
        await asyncio.to_thread(ranks.stop)


async def _draft(config: Config, arguments: Namespace) -> None:
    name = arguments.name
    check_in_pool(config, name)
    worker = await asyncio.to_thread(load_drafter, config, name)
    await _serve(worker, f"drafter {name}", config, arguments)


def check_in_pool(config: Config, name: str) -> None:
    """Raise NotFoundError unless a drafter of that name runs in a process of its own."""
    if name in config.residents:
        raise NotFoundError(
            f"drafter {name!r} runs inside the target; to run it in a process of its own, give it "
            f"one: drafters.{name}.placement={{num_cpus: 1}}"
        )
    if name not in config.drafters:
        known = ", ".join(config.pool) or "none"
        raise NotFoundError(f"no drafter is named {name!r}; the pool of the file has: {known}")


async def _serve(worker: Any, title: str, config: Config, arguments: Namespace) -> None:
    """Start a worker, serve it until a signal comes, and stop it."""
    worker.start()
    try:
        await serve_until_signal(worker, title, config, arguments)
    finally:
        await asyncio.to_thread(worker.stop)


async def serve_until_signal(part: Any, title: str, config: Config, arguments: Namespace) -> None:
    """Serve a part that was started, where its options say, until a signal comes.

    title: in the line that says where.  Raises as `run_until_signal` where the part says that it is
    not healthy any more."""
    server = await serve_worker(
        part,
        arguments.host,
        arguments.port,
        max_frame_bytes=config.coordinator.max_frame_bytes,
        trust=trust_of(config.data_plane, part.describe().role),
    )
    await run_until_signal(server, title, lambda: getattr(part, "is_healthy", True))
