"""What the control loop has learned, kept from one start to the next in a small file.

The file's name is a digest of all that the record hangs on: version, models, drafters, processor,
devices.  Where one of them differs there is another file, and the loop begins anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.config.schema import Config
from cluster.models.cache import cache_folder, write_whole
from cluster.rpc.messages import WorkerDescription

log = logging.getLogger(__name__)

# Often enough that a process which is killed loses little; a write takes milliseconds.
_INTERVAL_S = 60.0
_NUM_DIGEST_CHARS = 16
# Another number begins anew: for records that say something else in the same form.
_FORM = 8


def learned_file(config: Config, target: WorkerDescription, whose: str) -> Path:
    """Where the record of this deployment and this kind of target is kept; whose: each process that
    learns has a file of its own."""
    settings = asdict(config)
    depends_on = {
        "version": [importlib.metadata.version("drafthouse"), _FORM],
        "target": [target.model_hash, target.devices, target.native_build, target.max_batch_tokens],
        "engine": settings["target"]["engine"],
        "drafters": settings["drafters"],
        "whose": whose,
        "machine": [platform.machine(), platform.processor(), os.cpu_count()],
    }
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True, default=str).encode())
    return cache_folder() / "learned" / f"{digest.hexdigest()[:_NUM_DIGEST_CHARS]}.json"


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Replace the record; a disk that cannot be written costs a warning, no more."""
    try:
        write_whole(path, json.dumps(state))
    except OSError as error:
        log.warning("what was learned cannot be kept in %s: %s", path, error)


async def write_forever(path: Path, export: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
    """Keep the record once a minute, and when this is cancelled."""
    try:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            write(path, await export())
    finally:
        write(path, await export())


def keep(
    config: Config,
    target: WorkerDescription,
    whose: str,
    part: Any,
) -> list[Coroutine[Any, Any, None]]:
    """Begin with what `part` had learned before this start.

    Returns what keeps what it learns, to be run as tasks: nothing where that is not wanted."""
    settings = config.coordinator
    if not settings.keep_learned or settings.budget != "adaptive":
        return []
    path = learned_file(config, target, whose)
    try:
        part.restore_learned(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        log.debug("nothing was learned before")
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        log.warning("what was learned before is of another form, and left aside: %s", error)
    return [write_forever(path, part.export_learned)]
