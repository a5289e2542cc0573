"""The models of drafters: which there are, and whether they can be loaded beside those that draft.

torch is imported where there are any.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cluster.config.parse import check_that, parse
from cluster.config.schema import Config, DrafterConfig, EngineConfig
from cluster.draft.options import HEAD_KINDS
from cluster.errors import ConfigError
from cluster.models.resolve import resolve, resolve_head
from cluster.models.weights import check_finite, stored_bytes
from cluster.rpc.messages import WorkerDescription


def parts_of(config: Config, name: str) -> dict[str, DrafterConfig]:
    """The settings of a drafter and of its stages, by name."""
    return {each: config.drafters[each] for each in (name, *config.drafters[name].stages)}


def model_folders(parts: Mapping[str, DrafterConfig]) -> dict[str, Path]:
    """The folders of these drafters' models, by the paths of the keys that name them."""
    found: dict[str, Path] = {}
    for name, settings in parts.items():
        path, options = f"drafters.{name}.options", settings.options
        if isinstance(options.get("engine"), Mapping):
            with ConfigError.below(f"{path}.engine", "model"):
                model = parse(EngineConfig, options["engine"]).model
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
        from cluster.engine.loading.inspection import describe
        from cluster.engine.loading.planned import planned

        with ConfigError.below(path):
            check_finite(folder)
            own = parts[path.split(".")[1]].options.get("engine")
            if own is None:
                engine = EngineConfig()
                needed = stored_bytes(folder)
            else:
                engine = parse(EngineConfig, own)
                sizes = planned(folder, describe(folder, engine), engine, is_here=True)
                needed = sizes.weights + cache_bytes
            check_room(folder, needed, free_bytes(resolve_device(device or engine.device)))


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
    check_that(
        not all(told) or told[0] == told[1],
        f"drafters.{former.name}.options",
        f"the model has another vocabulary ({later.vocab_size} tokens, tokenizer "
        f"{later.tokenizer_hash[:12] or 'unknown'}) than the one that drafts "
        f"({former.vocab_size}, {former.tokenizer_hash[:12] or 'unknown'}); use one with the "
        "target's tokenizer",
    )
