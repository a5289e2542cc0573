"""The target worker: serves the streams of coordinators with one step loop."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.config.live import changed
from cluster.config.parse import check_that
from cluster.config.schema import Config
from cluster.draft.host import layers_of
from cluster.draft.options import OWN_LAYERS
from cluster.engine.engine import Engine
from cluster.engine.loading.peft_folder import read_adapters
from cluster.errors import ConfigError, WorkerError
from cluster.models.fingerprint import NO_MODEL
from cluster.plan import autoscaling
from cluster.plan.controller import Controller
from cluster.plan.roster import DraftScores, Roster
from cluster.rpc.link import Link, run_until_first_ends
from cluster.rpc.messages import (
    HEARTBEAT_S,
    AdapterList,
    Heartbeat,
    StepFrame,
    VerdictFrame,
    WorkerDescription,
)
from cluster.worker.mailbox import TargetStream
from cluster.worker.models import check_models, parts_of
from cluster.worker.priority import freeze_gc
from cluster.worker.residents import ResidentDrafter
from cluster.worker.step_loop import StepLoop
from cluster.worker.target_parts import TargetParts
from cluster.worker.text_keeper import TextKeeper

log = logging.getLogger(__name__)

# A coordinator is silent if it was not heard between so many looks, one after the other.
_NUM_LOOKS = 4


class TargetWorker:
    """Serves any number of coordinators; `start` it first, `stop` it last.

    While it serves, others change its LoRA adapters, the models of the drafters inside it, and how
    it plans its steps.  A new model is loaded beside the old one and checked, in a thread of its
    own.  Whatever is wrong with it is raised there, and nothing has changed.  Then, between two
    steps, it takes the old one's place with nothing of its trees and caches: it says that it holds
    none of the texts, and is told them again.
    """

    def __init__(
        self,
        parts: TargetParts,
        config: Config,
        description: WorkerDescription,
        *,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """parts: made by `config`."""
        self._parts, self._config, self._description = parts, config, description
        self._heartbeat_s = heartbeat_s
        scores = DraftScores(Roster(config, parts.residents.names))
        settings, measured = config.coordinator, (parts.profile, parts.draft_times)
        self._controller = Controller(settings, *measured, scores)
        texts = TextKeeper(parts.verifier, parts.residents, self._controller, description)
        self._texts, self._mailbox = texts, texts.mailbox
        self.streams, self.recorder = texts.streams, texts.recorder
        self._loop = StepLoop(texts)
        self._thread = threading.Thread(target=self._loop.run, name="target-engine", daemon=True)
        self.streams.announce(AdapterList(parts.engine.adapters.references))

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the engine thread after its step, and then the engine.  Open links hear no more."""
        self._mailbox.close()
        if self._thread.is_alive():
            self._thread.join()
        self._parts.engine.close()

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

    async def serve(self, link: Link[VerdictFrame, StepFrame]) -> None:
        """Serve one link until it ends; then free everything it has created.

        Raises WorkerError when the engine is broken, so that the peer goes elsewhere at once.
        """
        stream = self.streams.open(link)
        try:
            if self._texts.broken is None:  # an engine that breaks now ends the open stream
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
            names = tuple(text.name for text in self._texts.of(stream))
            beat = Heartbeat(names, heard)
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

    def reconfigure(self, config: Config, user_config: Any) -> str:
        """Serve by `config` with `user_config`, and tell the coordinators; returns why that cannot
        be, "" if it can.

        A drafter with another model is loaded while the present one drafts.  Running requests keep
        their adapters.  If anything cannot be, nothing changes, and the reason is logged too.  May
        be called from any thread while another steps the engine.
        """
        refused, engine = "", self._parts.engine
        try:
            wanted = changed(config, user_config)
            # Those that have other options now, while the present ones serve.
            loaded = [
                self._loaded(wanted, name)
                for name in wanted.residents
                if parts_of(wanted, name) != parts_of(self._config, name)
            ]
            engine.model.adapters.serve(read_adapters(wanted.target.engine))
        except Exception as error:  # noqa: BLE001 - libraries raise anything for what is too large
            refused = error.message if isinstance(error, ConfigError) else repr(error)
            log.error("the target stays as it is: %s", refused)
        else:
            self.take_up(wanted, loaded)
            self._mailbox.call(partial(self._controller.use, wanted.coordinator))
            names = ", ".join(engine.adapters.names)
            log.info("reconfigured; adapters served: %s", names or "none")
        served = engine.adapters.references
        self.streams.announce(AdapterList(served, refused))
        return refused

    def take_up(self, wanted: Config, loaded: Sequence[ResidentDrafter]) -> None:
        """Let drafters that were loaded by this configuration draft from the next step on."""
        self._config = wanted
        if not loaded:
            return
        for drafter in loaded:
            drafter.begin()
        former = self._mailbox.call(lambda: self._loop.exchange(loaded)).result()
        # Coordinators that are there hear of them with the next announcement.
        self.streams.engines = engines = self._parts.engines
        self._description = replace(self._description, engines=engines)
        for drafter in loaded:
            log.info("drafter made anew name=%s model=%s", drafter.name, drafter.model.model_hash)
        had_models = any(each.model != NO_MODEL for each in former)
        # Here, and not in the engine's thread: to free a model or to close a file takes time.
        del former
        # Models are in circles of references, which nobody else looks for then.  On busy cores it
        # stops the process for longer than a silence may be, so it is not done for a look-up.
        if had_models and gc.get_freeze_count():
            freeze_gc()

    def _loaded(self, wanted: Config, name: str) -> ResidentDrafter:
        """Load a drafter; raises ConfigError, which names the key, for one that cannot draft."""
        path, parts = f"drafters.{name}.options", parts_of(wanted, name)
        check_that(
            name in self._parts.residents.names,
            path,
            "this drafter was refused when the target started; restart the target",
        )
        kind = next((each.kind for each in parts.values() if each.kind in OWN_LAYERS), "")
        check_that(
            not kind,
            path,
            f"{kind} runs the target's own layers, which do not change; restart the target",
        )
        former = next(each.engine for each in self._parts.residents if each.name == name)
        cache = former.cache if isinstance(former, Engine) else None
        # What is free while both are there is not what will be.
        num_pages = cache.num_pages[0] if cache and len(cache.num_pages) == 1 else 0
        try:
            check_models(parts, str(self._parts.engine.device), cache.num_bytes if cache else 0)
            drafter = self._parts.resident(wanted, name, beside=True, num_pages=num_pages)
        except ConfigError:
            raise
        except Exception as error:  # whatever a library raises for a damaged or too large model
            raise ConfigError.at(path, f"{error!r}; name another model") from error
        self._check_fits(drafter, wanted)
        drafter.begin_afresh(keeps_stalls=False)
        return drafter

    def _check_fits(self, drafter: ResidentDrafter, wanted: Config) -> None:
        """Raise ConfigError for one that needs other steps of the target, or other layers in its
        cache, than the target was made ready for."""
        like = self._parts.engine.model.layers[0]
        caches = [
            [layers_of(config, part, like) for part in parts_of(config, drafter.name)]
            for config in (wanted, self._config)
        ]
        known = self._parts.residents.wants
        check_that(
            known | drafter.wants == known and caches[0] == caches[1],
            f"drafters.{drafter.name}.options",
            f"it reads {drafter.wants} of the target's steps and keeps {caches[0]} in the "
            f"target's cache, which was made ready for {known} and {caches[1]}; restart the "
            "target with it",
        )
