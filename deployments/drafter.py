"""A drafter as a Ray Serve deployment; the configuration has one deployment per drafter."""

from __future__ import annotations

import asyncio
import logging

from cluster.config.schema import Config
from cluster.errors import ConfigError, WorkerError
from cluster.rpc.server import serve_drafter
from cluster.worker.build import load_drafter
from deployments.endpoints import REFUSAL_KEY
from deployments.replica import WorkerReplica, configure_logging, process_id

log = logging.getLogger(__name__)

# Serve keeps it with every replica and sends it to all who hold a handle.
_MAX_REFUSAL_LEN = 1000


class DrafterDeployment(WorkerReplica):
    """One drafter replica: its growth thread, and a gRPC server for the coordinators.

    torch is imported by the kinds that need it, so token-only drafters start in a moment.
    """

    async def __init__(self, config: Config, name: str) -> None:  # type: ignore[misc]  # awaited
        configure_logging()
        self._refusal = ""
        try:
            # Loading a model takes seconds, and Serve asks for the state meanwhile.
            self._worker = await asyncio.to_thread(
                load_drafter, config, name, process_id(f"drafter-{name}")
            )
        except ConfigError as error:
            if _may_pass(error):
                raise
            # It would be the same at the next attempt.  A deployment that fails would hold up the
            # whole application; so the replica stays, and says why it does not draft.
            log.error("drafter refused name=%s: %s", name, error.message)
            self._refusal = error.message[:_MAX_REFUSAL_LEN]
            return
        self._worker.start()
        await self._listen(config, serve_drafter, self._worker)

    async def record_replica_metadata(self) -> dict[str, str]:
        """Serve passes this on to whoever holds a handle."""
        if self._refusal:
            return {REFUSAL_KEY: self._refusal}
        return await super().record_replica_metadata()

    async def check_health(self) -> None:
        """Raises when the drafter fails again and again: Serve then replaces the replica."""
        if not self._refusal and not self._worker.is_healthy:
            raise WorkerError("the drafter keeps failing; the replica must be replaced")

    async def __del__(self) -> None:
        if hasattr(self, "_server"):
            await self._stop_listening()
            await asyncio.to_thread(self._worker.stop)


def _may_pass(error: ConfigError) -> bool:
    """Whether Serve's next attempt may succeed: another process may free its memory meanwhile."""
    out_of_memory = type(error.__cause__).__name__ == "OutOfMemoryError"  # torch's, not imported
    return out_of_memory or (error.param or "").endswith("memory_fraction")
