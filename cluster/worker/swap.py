"""Changes what a target does while it serves: its LoRA adapters, the models of the drafters inside
it, and how it plans its steps.

A new model is loaded beside the old one and checked, in a thread of its own.  Whatever is wrong
with it is raised there, and nothing has changed.  Then, between two steps, it takes the old one's
place with nothing of its trees and caches: it says that it holds none of the texts, and is told
them again.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import Any

from cluster.config.live import changed
from cluster.config.schema import Config
from cluster.draft.options import OWN_LAYERS
from cluster.engine.engine import Engine
from cluster.engine.loading.peft_folder import read_adapters
from cluster.errors import ConfigError
from cluster.messages import AdapterList
from cluster.models.fingerprint import NO_MODEL
from cluster.worker.host import layers_of
from cluster.worker.models import check_models, parts_of
from cluster.worker.priority import freeze_gc
from cluster.worker.residents import ResidentDrafter
from cluster.worker.target import TargetWorker
from cluster.worker.target_parts import TargetParts

log = logging.getLogger(__name__)


class Swaps:
    """Changes a target, and makes its residents anew where their options have changed."""

    def __init__(self, parts: TargetParts, config: Config, worker: TargetWorker) -> None:
        self._parts, self._config, self._worker = parts, config, worker

    def reconfigure(self, config: Config, user_config: Any) -> str:
        """Serve by `config` with `user_config`, and tell the coordinators; returns why that cannot
        be, "" if it can.

        A drafter with another model is loaded while the present one drafts.  Running requests keep
        their adapters.  If anything cannot be, nothing changes, and the reason is logged too.  May
        be called from any thread while another steps the engine.
        """
        refused = ""
        try:
            wanted = changed(config, user_config)
            loaded = self._load(wanted)
            self._parts.engine.model.adapters.serve(read_adapters(wanted.target.engine))
        except ConfigError as error:
            log.error("the target stays as it is: %s", error.message)
            refused = error.message
        else:
            self.use(wanted, loaded)
            self._worker.use(wanted.coordinator)
            names = ", ".join(self._parts.engine.adapters.names)
            log.info("reconfigured; adapters served: %s", names or "none")
        served = self._parts.engine.adapters.references
        self._worker.streams.announce(AdapterList(served, refused))
        return refused

    def _load(self, wanted: Config) -> list[ResidentDrafter]:
        """Load the drafters that have other options by `wanted`, while the present ones serve.

        Raises ConfigError, which names the key, for one that cannot draft."""
        return [
            self._loaded(wanted, name)
            for name in wanted.residents
            if parts_of(wanted, name) != parts_of(self._config, name)
        ]

    def use(self, wanted: Config, loaded: Sequence[ResidentDrafter]) -> None:
        """Let what `_load` has returned draft from the next step on."""
        self._config = wanted
        if not loaded:
            return
        for drafter in loaded:
            drafter.begin()
        former = self._worker.exchange(loaded)
        self._worker.use_engines(self._parts.engines)
        for drafter in loaded:
            log.info("drafter made anew name=%s model=%s", drafter.name, drafter.model.model_hash)
        had_models = any(each.model != NO_MODEL for each in former)
        del former  # here, and not in the engine's thread
        # Models are in circles of references, which nobody else looks for then.  On busy cores it
        # stops the process for longer than a silence may be, so it is not done for a look-up.
        if had_models and gc.get_freeze_count():
            freeze_gc()

    def _loaded(self, wanted: Config, name: str) -> ResidentDrafter:
        path, parts = f"drafters.{name}.options", parts_of(wanted, name)
        if name not in self._parts.residents.names:
            reason = "this drafter was refused when the target started; restart the target"
            raise ConfigError.at(path, reason)
        if kind := next((each.kind for each in parts.values() if each.kind in OWN_LAYERS), ""):
            reason = f"{kind} runs the target's own layers, which do not change; restart the target"
            raise ConfigError.at(path, reason)
        former = next(each.engine for each in self._parts.residents if each.name == name)
        cache = former.cache if isinstance(former, Engine) else None
        check_models(parts, str(self._parts.engine.device), cache.num_bytes if cache else 0)
        # What is free while both are there is not what will be.
        num_pages = cache.num_pages[0] if cache and len(cache.num_pages) == 1 else 0
        try:
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
        if known | drafter.wants != known or caches[0] != caches[1]:
            raise ConfigError.at(
                f"drafters.{drafter.name}.options",
                f"it reads {drafter.wants} of the target's steps and keeps {caches[0]} in the "
                f"target's cache, which was made ready for {known} and {caches[1]}; restart the "
                "target with it",
            )
