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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.config.live import changed
from cluster.config.parse import parse
from cluster.config.schema import Config, CoordinatorConfig, DrafterConfig, EngineConfig
from cluster.draft.head_options import HEAD_KINDS
from cluster.draft.own_layers_options import OWN_LAYERS
from cluster.errors import ConfigError
from cluster.messages import AdapterList, WorkerDescription
from cluster.models.resolve import resolve, resolve_head
from cluster.models.weights import check_finite
from cluster.worker.priority import freeze_gc
from cluster.worker.residents import ResidentDrafter, Residents

if TYPE_CHECKING:
    from cluster.engine.engine import Engine
    from cluster.engine.memory.kv_cache import KVCache

log = logging.getLogger(__name__)

# Makes a resident by a configuration, ready to draft.  Raises ConfigError.
Make = Callable[[Config, str], ResidentDrafter]


def model_folders(parts: Mapping[str, DrafterConfig]) -> dict[str, Path]:
    """The folders of these drafters' models, by the paths of the keys that name them."""
    found: dict[str, Path] = {}
    for name, settings in parts.items():
        path, options = f"drafters.{name}.options", settings.options
        if isinstance(options.get("engine"), Mapping):
            with ConfigError.below(f"{path}.engine", "model"):
                model = parse(EngineConfig, options["engine"], "").model
                found[f"{path}.engine.model"] = resolve(model)
        elif settings.kind in HEAD_KINDS and options.get("model"):
            with ConfigError.below(path, "model"):
                found[f"{path}.model"] = resolve_head(str(options["model"]))
    return found


def check_models(
    parts: Mapping[str, DrafterConfig], device: str = "", cache_bytes: int = 0
) -> None:
    """Raise ConfigError for models that cannot be loaded now beside those that draft: weights that
    are no numbers, or for which there is no room.

    device: where they are to be, "" = where their own options say.  cache_bytes: of a KV cache."""
    for path, folder in model_folders(parts).items():
        # Only kinds with a model need torch.
        from cluster.engine.device import free_bytes, resolve_device
        from cluster.engine.loading.held import held

        with ConfigError.below(path):
            check_finite(folder)
            own = parts[path.split(".")[1]].options.get("engine")
            engine = EngineConfig() if own is None else parse(EngineConfig, own)
            weights = (
                sum(each.stat().st_size for each in folder.glob("*.safetensors"))
                if own is None
                else held(folder, engine).weights
            )
            free = free_bytes(resolve_device(device or engine.device))
            check_room(folder, weights + (0 if own is None else cache_bytes), free)


def check_room(folder: Path, needed: int, free: int) -> None:
    """Raise ConfigError where weights do not fit beside what is in memory."""
    if needed > free:
        raise ConfigError(
            f"{folder} takes {needed:,} bytes beside the model that drafts, which stays until the "
            f"new one is ready, and {free:,} are free; free so much, or restart with the new one"
        )


def check_successor(former: WorkerDescription, later: WorkerDescription) -> None:
    """Raise ConfigError where a drafter of the pool reads another vocabulary than the one before,
    which fitted the target."""
    hashes = former.tokenizer_hash, later.tokenizer_hash
    # Models with the same tokenizer may be padded to other sizes.
    told = hashes if all(hashes) else (former.vocab_size, later.vocab_size)
    if all(told) and told[0] != told[1]:
        raise ConfigError.at(
            f"drafters.{former.name}.options",
            f"the model has another vocabulary ({later.vocab_size} tokens, tokenizer "
            f"{later.tokenizer_hash[:12] or 'unknown'}) than the one that drafts "
            f"({former.vocab_size}, {former.tokenizer_hash[:12] or 'unknown'}); use one with the "
            "target's tokenizer",
        )


class Swaps:
    """Changes a target, and makes its residents anew where their options have changed."""

    def __init__(
        self,
        engine: Engine,
        config: Config,
        residents: Residents,
        make: Make,
        exchange: Callable[[Sequence[ResidentDrafter]], Sequence[ResidentDrafter]],
        plan_by: Callable[[CoordinatorConfig], None],
    ) -> None:
        """exchange: lets these draft, and returns those of their names.  plan_by: is told the
        settings by which steps are planned from then on."""
        self._engine, self._config, self._residents = engine, config, residents
        self._make, self._exchange, self._plan_by = make, exchange, plan_by

    def reconfigure(self, config: Config, user_config: Any) -> AdapterList:
        """Serve by `config` with `user_config`; returns the adapters that are then served.

        A drafter with another model is loaded while the present one drafts.  Running requests keep
        their adapters.  If anything cannot be, nothing changes, and the reason is logged and
        returned.  May be called from any thread while another steps the engine.
        """
        from cluster.engine.loading.peft_folder import read_adapters

        refused = ""
        try:
            wanted = changed(config, user_config)
            loaded = self._load(wanted)
            self._engine.model.adapters.serve(read_adapters(wanted.target.engine))
        except ConfigError as error:
            log.error("the target stays as it is: %s", error.message)
            refused = error.message
        else:
            self.use(wanted, loaded)
            self._plan_by(wanted.coordinator)
            names = ", ".join(self._engine.adapters.names)
            log.info("reconfigured; adapters served: %s", names or "none")
        return AdapterList(self._engine.adapters.references, refused)

    def _load(self, wanted: Config) -> list[ResidentDrafter]:
        """Load the drafters that have other options by `wanted`, while the present ones serve.

        Raises ConfigError, which names the key, for one that cannot draft."""
        changed = [
            name
            for name in wanted.residents
            if parts_of(wanted, name) != parts_of(self._config, name)
        ]
        return [self._loaded(wanted, name) for name in changed]

    def use(self, wanted: Config, loaded: Sequence[ResidentDrafter]) -> None:
        """Let what `_load` has returned draft from the next step on."""
        for drafter in loaded:
            drafter.begin()
        former = self._exchange(loaded) if loaded else ()
        self._config = wanted
        for drafter in loaded:
            log.info("drafter made anew name=%s model=%s", drafter.name, drafter.model.model_hash)
        del former  # here, and not in the engine's thread
        if loaded and gc.get_freeze_count():
            freeze_gc()  # a model is in circles of references, which nobody else looks for then

    def _loaded(self, wanted: Config, name: str) -> ResidentDrafter:
        from cluster.engine.engine import Engine

        path, parts = f"drafters.{name}.options", parts_of(wanted, name)
        if name not in self._residents.names:
            reason = "this drafter was refused when the target started; restart the target"
            raise ConfigError.at(path, reason)
        if kind := next((each.kind for each in parts.values() if each.kind in OWN_LAYERS), ""):
            reason = f"{kind} runs the target's own layers, which do not change; restart the target"
            raise ConfigError.at(path, reason)
        former = next(each.engine for each in self._residents if each.name == name)
        cache = former.cache if isinstance(former, Engine) else None
        check_models(parts, str(self._engine.device), cache.num_bytes if cache else 0)
        try:
            drafter = self._make(_with_pages(wanted, name, cache), name)
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
        from cluster.worker.host import layers_of

        like = self._engine.model.layers[0]
        caches = [
            [layers_of(config, part, like) for part in parts_of(config, drafter.name)]
            for config in (wanted, self._config)
        ]
        known = self._residents.wants
        if known | drafter.wants != known or caches[0] != caches[1]:
            raise ConfigError.at(
                f"drafters.{drafter.name}.options",
                f"it reads {drafter.wants} of the target's steps and keeps {caches[0]} in the "
                f"target's cache, which was made ready for {known} and {caches[1]}; restart the "
                "target with it",
            )


def _with_pages(config: Config, name: str, cache: KVCache | None) -> Config:
    """A configuration by which the drafter's cache is as large as the former one, if its own
    options say nothing else: what is free while both are there is not what will be."""
    drafter = config.drafters[name]
    own = drafter.options.get("engine")
    if cache is None or len(cache.num_pages) > 1 or own is None or own.get("num_pages"):
        return config
    options = {**drafter.options, "engine": {**own, "num_pages": cache.num_pages[0]}}
    drafters = {**config.drafters, name: replace(drafter, options=options)}
    return replace(config, drafters=drafters)


def parts_of(config: Config, name: str) -> dict[str, DrafterConfig]:
    """The settings of a drafter and of its stages, by name."""
    return {each: config.drafters[each] for each in (name, *config.drafters[name].stages)}
