"""The kinds of drafters.

A new kind is one file and one line in KINDS.  An external drafter needs no line: the configuration
names it `module:Class`, and the class has its options dataclass as the attribute `Options`.

A kind's modules are imported when it is used, so a pool without an LM drafter runs without torch,
and so does the check of a configuration of our own kinds.
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
    """The classes of one kind, as module:Class.

    drafter: a class that is called with (DrafterContext, options).  options: a frozen dataclass in
    a module without torch; its __post_init__ raises ConfigError for bad values.
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
    """Parse the options of drafter `name` strictly; returns an instance of its options class.

    Raises ConfigError with a path that starts with drafters.NAME.
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
    """The kind with that name, or None."""
    if ":" in name:
        return Kind(name, f"{name}.Options")
    return kinds.get(name)


def _options(kind: Kind, values: Mapping[str, Any], path: str) -> Any:
    try:
        return parse(_resolve(kind.options), values, path)
    except ConfigError as error:
        if error.param is not None and error.param.startswith(path):
            raise
        # Raised by the options class itself, which does not know its path in the file.
        param = f"{path}.{error.param}" if error.param else path
        raise ConfigError(f"{path}.{error.message}", param=param) from error


def create(
    name: str,
    config: DrafterConfig,
    context: DrafterContext,
    kinds: Mapping[str, Kind] = KINDS,
) -> Drafter:
    """Build drafter `name`; load its model, if it has one.

    Raises ConfigError for wrong options, for a model that cannot be served, and for one whose
    vocabulary differs from the target's.
    """
    options = check(name, config, kinds)
    kind = _find(config.kind, kinds)
    assert kind is not None  # checked
    return cast(Drafter, _resolve(kind.drafter)(context, options))


def _resolve(location: str) -> Any:
    """Import the object at `location`: module:Class, or module:Class.attribute."""
    module, _, path = location.partition(":")
    return reduce(getattr, path.split("."), importlib.import_module(module))
