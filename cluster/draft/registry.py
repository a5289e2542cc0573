"""Which kinds of drafters there are.

A new kind is one file and one line in KINDS.  One that is not ours needs no line: it is named
`module:Class`, and the class names its options dataclass as the attribute `Options`.

Modules are imported when a kind is used, so a pool without a drafting LM runs without torch, and
so does the check of any configuration of our own kinds.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any, cast

from cluster.config import DrafterConfig
from cluster.config_parse import parse, unknown_key
from cluster.draft.base import Drafter, DrafterContext
from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    """Where a kind lives, as module:Class.

    drafter: a class that is called with (DrafterContext, options).  options: a frozen dataclass
    in a torch-free module; it refuses bad values in __post_init__ with a ConfigError.
    """

    drafter: str
    options: str


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "lm": Kind("cluster.draft.lm:LMDrafter", "cluster.draft.lm_options:LMOptions"),
        "prompt_lookup": Kind(
            "cluster.draft.prompt_lookup:PromptLookupDrafter",
            "cluster.draft.prompt_lookup:PromptLookupOptions",
        ),
        "suffix": Kind("cluster.draft.suffix:SuffixDrafter", "cluster.draft.suffix:SuffixOptions"),
        "ngram_cache": Kind(
            "cluster.draft.ngram_cache:NgramCacheDrafter",
            "cluster.draft.ngram_cache:NgramCacheOptions",
        ),
    }
)


def check(name: str, config: DrafterConfig, kinds: Mapping[str, Kind] = KINDS) -> Any:
    """The options of drafter `name`, strictly parsed; an instance of its kind's options class.

    Raises ConfigError whose path starts with drafters.NAME.
    """
    path = f"drafters.{name}"
    kind = _find(config.kind, kinds)
    if kind is None:
        path = f"{path}.kind"
        if not config.kind:
            raise ConfigError(f"{path}: missing; known kinds: {', '.join(kinds)}", param=path)
        error = unknown_key(config.kind, list(kinds), path)
        message = error.message.replace("unknown key", f"unknown kind {config.kind!r}")
        raise ConfigError(message.replace("known keys", "known kinds"), param=path)
    try:
        return _options(kind, config.options, f"{path}.options")
    except (ImportError, AttributeError) as error:
        path = f"{path}.kind"
        message = f"{path}: {config.kind!r} cannot be loaded: {error}"
        raise ConfigError(message, param=path) from error


def _find(name: str, kinds: Mapping[str, Kind]) -> Kind | None:
    """The kind of that name; None where there is none of it."""
    if ":" in name:
        return Kind(name, f"{name}.Options")
    return kinds.get(name)


def _options(kind: Kind, values: Mapping[str, Any], path: str) -> Any:
    try:
        return parse(_resolve(kind.options), values, path)
    except ConfigError as error:
        if error.param is not None and error.param.startswith(path):
            raise
        # Raised by the options class itself, which does not know where it stands in the file.
        param = f"{path}.{error.param}" if error.param else path
        raise ConfigError(f"{path}.{error.message}", param=param) from error


def create(
    name: str,
    config: DrafterConfig,
    context: DrafterContext,
    kinds: Mapping[str, Kind] = KINDS,
) -> Drafter:
    """Build drafter `name`; loads its model, if it has one.

    Raises ConfigError for options that are wrong, for a model that cannot be served, and for one
    whose vocabulary is not the target's.
    """
    options = check(name, config, kinds)
    kind = _find(config.kind, kinds)
    assert kind is not None  # checked
    return cast(Drafter, _resolve(kind.drafter)(context, options))


def _resolve(location: str) -> Any:
    """What `location` names: module:Class, or an attribute of the class after a dot."""
    module, _, path = location.partition(":")
    return reduce(getattr, path.split("."), importlib.import_module(module))
