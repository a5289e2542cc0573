"""The target worker: serves the streams of coordinators with one step loop."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.config.schema import Config, CoordinatorConfig
from cluster.errors import WorkerError
from cluster.messages import (
    HEARTBEAT_S,
    Heartbeat,
    StepFrame,
    VerdictFrame,
    WorkerDescription,
)
from cluster.models.engine_state import EngineState
from cluster.plan import autoscaling
from cluster.plan.controller import Controller
from cluster.rpc.link import Link, run_until_first_ends
from cluster.worker.mailbox import TargetStream
from cluster.worker.residents import ResidentDrafter, Residents
from cluster.worker.step_loop import StepLoop
from cluster.worker.verifier import Verifier

log = logging.getLogger(__name__)

TargetLink = Link[VerdictFrame, StepFrame]

# A coordinator is silent if it was not heard between so many looks, one after the other.
_NUM_LOOKS = 4


class TargetWorker:
    """Serves any number of coordinators; `start` it first, `stop` it last.

    reconfigure: changes it while it serves, as `cluster.worker.swap` says; set by who has its
    configuration.
    """

    reconfigure: Callable[[Config, Any], str]

    def __init__(
        self,
        verifier: Verifier,
        description: WorkerDescription,
        controller: Controller,
        residents: Residents,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        """close: ends the engine, once the engine thread has."""
        self._description = description
        self._controller = controller
        self._heartbeat_s, self._close = heartbeat_s, close
        loop = StepLoop(verifier, residents, controller, description)
        self._loop, self._mailbox, self._texts = loop, loop.mailbox, loop.texts
        self.streams, self.recorder = loop.streams, loop.recorder
        self._thread = threading.Thread(target=self._loop.run, name="target-engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the engine thread after its step, and then the engine.  Open links hear no more."""
        self._mailbox.close()
        if self._thread.is_alive():
            self._thread.join()
        self._close()

    def use(self, settings: CoordinatorConfig) -> None:
        """Plan the next steps by these settings; may be called from any thread."""
        self._mailbox.call(partial(self._controller.use, settings))

    def exchange(self, drafters: Sequence[ResidentDrafter]) -> list[ResidentDrafter]:
        """Draft with these in place of the residents of their names; returns those once that is so.

        May be called from any thread but the engine's, and in that thread the former ones end: to
        free a model or to close a file takes time."""
        return self._mailbox.call(lambda: self._loop.exchange(drafters)).result()

    def use_engines(self, engines: tuple[EngineState, ...]) -> None:
        """Describe these in place of the former ones; coordinators that are there hear of them with
        the next announcement."""
        self._description = replace(self._description, engines=engines)
        self.streams.engines = engines

    def describe(self) -> WorkerDescription:
        return self._description

    def statistics(self) -> dict[str, float]:
        """Return what its autoscaling is to know."""
        load = self.streams.load
        return {
            autoscaling.TEXTS: load.num_running + load.num_waiting,
            autoscaling.PLACES: self._description.max_running_sequences,
            autoscaling.KV_USE: load.pages_in_use / max(load.pages_total, 1),
        }

    @property
    def is_healthy(self) -> bool:
        """False when the engine cannot be used any more; then this process must be replaced."""
        return self._texts.broken is None and self._thread.is_alive()

    def restore_learned(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `export_learned`; call it before `start`.  Raises for a record
        of another form, as `Controller.restore` does."""
        self._controller.restore(state)

    async def export_learned(self) -> Mapping[str, Any]:
        """Return what the control loop has learned as one record of plain values."""
        return await asyncio.wrap_future(self._mailbox.call(self._controller.export))

    async def serve(self, link: TargetLink) -> None:
        """Serve one link until it ends; then free everything it has created.

        Raises WorkerError when the engine is broken, so that the peer goes elsewhere at once.
        """
        if self._texts.broken is not None:
            raise self._texts.broken
        stream = self.streams.open(link)
        try:
            await run_until_first_ends(
                stream.read_forever(self._mailbox, self._texts.apply),
                stream.send_forever(),
                self._beat(stream),
                self._report(stream),
                self._watch(stream),
            )
        except WorkerError as error:
            log.info("target link broke: %s", error.message)
        finally:
            self.streams.close(stream)
            self._mailbox.put(partial(self._texts.free, stream))
            await link.close()
            if self._texts.broken is not None:
                raise self._texts.broken

    async def _beat(self, stream: TargetStream) -> None:
        """Tell the coordinator again and again which of its texts are here.

        This runs on the event loop and waits for nothing but time, because the engine thread may
        be in a long step."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            heard = stream.heard  # before the names, which so have all that was heard
            beat = Heartbeat(self._texts.names(stream), heard)
            stream.post(VerdictFrame(heartbeat=beat, load=self.streams.load))

    async def _report(self, stream: TargetStream) -> None:
        """Tell the coordinator that counts of the target's own metrics, between two steps."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if stream.counts:
                report, state = await asyncio.wrap_future(self._mailbox.call(self._loop.report))
                status = json.dumps(state, allow_nan=False)
                page = await asyncio.to_thread(self.recorder.render)
                stream.post(VerdictFrame(report=report, status=status, page=page))

    async def _watch(self, stream: TargetStream) -> None:
        """Return when the coordinator has fallen silent."""
        num_quiet, silence_s = 0, self._controller.config.target_silence_s
        while num_quiet < _NUM_LOOKS:
            stream.is_heard = False
            await asyncio.sleep(silence_s / _NUM_LOOKS)
            # While the engine thread has not caught up, nobody listens.
            is_heard = stream.is_heard or stream.is_behind
            num_quiet = 0 if is_heard else num_quiet + 1
        log.warning("a coordinator has said nothing for %.1f s; its texts are freed", silence_s)
