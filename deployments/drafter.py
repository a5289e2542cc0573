"""A drafter as a Ray Serve deployment; the configuration has one deployment per drafter."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cluster.config.live import changed_drafter
from cluster.config.schema import Config
from cluster.errors import ConfigError, WorkerError
from cluster.plan.autoscaling import PRICE
from cluster.rpc.link import Link
from cluster.rpc.messages import CommitFrame, ProposalFrame, WorkerDescription
from cluster.worker.build import load_drafter
from cluster.worker.draft_worker import DraftWorker
from cluster.worker.models import check_models, check_successor, parts_of
from cluster.worker.priority import freeze_gc
from deployments.endpoints import REFUSAL_KEY
from deployments.replica import WorkerReplica, process_id, told_at_start

log = logging.getLogger(__name__)

# Serve keeps it with every replica and sends it to all who hold a handle.
_MAX_REFUSAL_LEN = 1000


class DrafterDeployment(WorkerReplica):
    """One drafter replica: its growth thread, and a gRPC server for the coordinators.

    torch is imported by the kinds that need it, so token-only drafters start in a moment.
    """

    _worker: DraftWorker  # none where the drafter is refused: then it does not listen
    _is_refused = _can_work = False
    _change_refused = ""

    async def __init__(self, config: Config, name: str, others: Sequence[Any] = ()) -> None:  # type: ignore[misc]  # awaited
        """others: handles of drafters, where these are deployed with this one."""
        self._begin(config, "drafter")
        self._name = name
        self._settings = config.drafters[name]  # those that it has now
        self._changing = asyncio.Lock()
        try:
            self._worker = await self._first(told_at_start())
        except ConfigError as error:
            if _may_pass(error):
                raise
            # It would be the same at the next attempt.  A deployment that fails would hold up the
            # whole application; so the replica stays, and says why it does not draft.
            log.error("drafter refused name=%s: %s", name, error.message)
            self._is_refused = True
            self._metadata = {REFUSAL_KEY: error.message[:_MAX_REFUSAL_LEN]}
            return
        self._worker.start()
        self._ending.push_async_callback(lambda: asyncio.to_thread(self._worker.stop))
        await self._listen(self, self.statistics)

    async def _first(self, user_config: Any) -> DraftWorker:
        try:
            wanted = changed_drafter(self._config, self._name, user_config)
            worker = await self._load(wanted)
        except ConfigError:
            if not user_config:
                raise
            return await self._load(self._config)  # `reconfigure`, which follows, says why
        self._settings = wanted.drafters[self._name]
        return worker

    async def _load(self, config: Config, *, beside: bool = False) -> DraftWorker:
        own_id = process_id(f"drafter-{self._name}")
        # Loading a model takes seconds, and Serve asks for the state meanwhile.
        return await asyncio.to_thread(load_drafter, config, self._name, own_id, beside=beside)

    async def reconfigure(self, user_config: Any) -> None:
        """Serve calls it after the constructor and when the file's user_config has changed.

        The drafter is made anew beside the one that works, and takes its place.  One that cannot
        be made leaves all as it is, and the reason goes to the log and to /health: an exception
        would make Serve replace the replica."""
        async with self._changing:
            refused = ""
            try:
                wanted = changed_drafter(self._config, self._name, user_config)
                later = wanted.drafters[self._name]
                if replace(self._settings, price=later.price) != later:
                    await self._make_anew(wanted)
                self._settings = later
            except Exception as error:  # noqa: BLE001 - whatever the drafter's own code raises
                refused = error.message if isinstance(error, ConfigError) else repr(error)
                log.error("drafter %s stays as it is: %s", self._name, refused)
            refused = refused[:_MAX_REFUSAL_LEN]
            if refused != self._change_refused:
                self._change_refused = refused
                if not self._is_refused:
                    self._worker.renew_links()  # the description says it

    async def _make_anew(self, config: Config) -> None:
        """Load what takes the place of the drafter, which serves meanwhile."""
        if self._is_refused:
            await self._load(config)
            self._can_work = True  # but nobody is told where it listens: Serve asks only once
            return
        await asyncio.to_thread(check_models, parts_of(config, self._name))
        worker, former = await self._load(config, beside=True), self._worker
        if former.has_links:  # so it fits the target
            check_successor(former.describe(), worker.describe())
        self._worker = worker
        worker.start()
        await asyncio.to_thread(former.stop)
        del former
        await asyncio.to_thread(freeze_gc)
        log.info("drafter made anew name=%s", self._name)

    def describe(self) -> WorkerDescription:
        """Return the description of the drafter as it is now."""
        refused = {self._name: self._change_refused} if self._change_refused else {}
        return replace(self._worker.describe(), refused=refused)

    def statistics(self) -> dict[str, float]:
        """Return what autoscaling is to know of the drafter as it is now."""
        return {**self._worker.statistics(), PRICE: self._settings.price}

    async def serve(self, link: Link[ProposalFrame, CommitFrame]) -> None:
        """Serve one coordinator until the link ends, or the drafter is made anew."""
        await self._worker.serve(link)

    async def check_health(self) -> None:
        """Raises when the drafter fails again and again: Serve then replaces the replica."""
        if self._can_work:
            raise WorkerError("the drafter can work now; the replica must be replaced to be found")
        if not self._is_refused and not self._worker.is_healthy:
            raise WorkerError("the drafter keeps failing; the replica must be replaced")


def _may_pass(error: ConfigError) -> bool:
    """Whether Serve's next attempt may succeed: another process may free its memory meanwhile."""
    out_of_memory = type(error.__cause__).__name__ == "OutOfMemoryError"  # torch's, not imported
    return out_of_memory or (error.param or "").endswith("memory_fraction")
