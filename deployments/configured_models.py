"""A configuration's models before anything loads them: whether they are here, and how large."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.config.parse import parse
from cluster.config.schema import Config, EngineConfig
from cluster.errors import ConfigError
from cluster.logs import say
from cluster.models.names import KNOWN, HubSource, Source, source_of
from cluster.models.resolve import fetch, find, resolve
from cluster.records import frozen

TARGET = "target.engine"


@frozen
class ConfiguredEngine:
    """An engine that a configuration starts.

    path: of its key, TARGET of the target's.  drafter: whose it is, "" = the target's.  source: of
    its model."""

    path: str
    drafter: str
    settings: EngineConfig
    source: Source


def engines(config: Config) -> list[ConfiguredEngine]:
    """Every engine that `config` starts, the target's first.

    Raises ConfigError for a model that is neither here nor a name of one that can be fetched."""
    found = {TARGET: ("", config.target.engine)}
    for name, drafter in config.drafters.items():
        options = drafter.options.get("engine")
        if options is not None:
            path = f"drafters.{name}.options.engine"
            found[path] = name, parse(EngineConfig, options, path)
    result = []
    for path, (name, engine) in found.items():
        with ConfigError.below(path, "model"):
            result.append(ConfiguredEngine(path, name, engine, source_of(engine.model)))
    return result


def tokenizer_folder(model: str) -> Path:
    """The folder of the target's tokenizer; raises ConfigError where it cannot be had."""
    with ConfigError.below("target.engine", "model"):
        return resolve(model, only_tokenizer=True)


def has_chat_template(model: str) -> bool:
    """Whether the model, which is on this machine, takes conversations."""
    folder = find(source_of(model))
    if folder is None:
        return False
    if any(folder.glob("chat_template*")):
        return True
    try:
        described = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return bool(described.get("chat_template"))


def fetch_models(config: Config) -> None:
    """Get every model that is not on this machine; says one line about each of them."""
    for each in engines(config):
        source, model = each.source, each.settings.model
        with ConfigError.below(each.path, "model"):
            folder = fetch_model(model)
            if isinstance(source, HubSource) and not source.is_pinned:
                say(
                    f"{each.path}.model: {model} names no commit, so whoever may push there can "
                    f"change what is served; to pin this one: {source.repo_id}@{folder.name}"
                )


def fetch_model(model: str) -> Path:
    """The model's folder; says one line where it has to be fetched or converted first."""
    source = source_of(model)
    folder = find(source)
    if folder is None:
        known = KNOWN.get(model)
        cost = f" ({known.num_bytes / 1e6:,.0f} MB, {known.licence})" if known else ""
        say(f"getting {model}{cost}, this once")
        folder = fetch(source)
    return folder


def models_table() -> str:
    """The catalogue for people, with what this machine has of it."""
    rows = [("name", "parameters", "fetched", "licence", "here", "what")]
    for model in KNOWN.values():
        folder = find(model.source)
        rows.append(
            (
                model.name,
                f"{model.num_parameters / 1e6:,.0f} M",
                f"{model.num_bytes / 1e6:,.0f} MB" if model.num_bytes else "-",
                model.licence,
                "yes" if folder is not None and folder.is_dir() else "no",
                model.about,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        + "\n"
        for row in rows
    )
