"""The kinds of drafters.

A new kind is one file and one line in KINDS.  An external drafter needs no line: the configuration
names it `module:Class`.  If it has settings, its class has a frozen dataclass of them as the
attribute `Options`.  docs/own-drafter.md shows one.

A kind's modules are imported when it is used, so a pool without an LM drafter runs without torch,
and so does the check of a configuration of our own kinds.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, cast

from cluster.config.parse import check_known, check_that, parse
from cluster.config.processes import CASCADE, RECORDER
from cluster.config.schema import DrafterConfig
from cluster.cpp import NEEDED
from cluster.draft.base import Drafter, DrafterContext
from cluster.draft.plugin import TextDrafter
from cluster.errors import ConfigError, DrafthouseError
from cluster.records import frozen
from cluster.spec.native import trees

# What a drafter must have, and what its class is called with.
_METHODS = (Drafter.observe, Drafter.propose, Drafter.release)
_CONSTRUCTOR = ("context", "options")


@frozen
class Kind:
    """One kind.

    named: module:NAME of a class NAMEDrafter that is called with (DrafterContext, options).
    settings: of NAMEOptions, where that is another one: a frozen dataclass in a module without
    torch, with ranges as in `cluster.config.schema`; its __post_init__ raises ConfigError for
    values that do not fit together.  has_laws: its proposals come with the
    laws that the drafts were drawn from, where a request's law asks for them.  is_inside: it
    runs inside the target alone.
    """

    named: str
    settings: str = ""
    has_laws: bool = False
    is_inside: bool = False

    @property
    def drafter(self) -> str:
        """The drafter's class, as module:Class."""
        return f"cluster.draft.{self.named}Drafter"

    @property
    def options(self) -> str:
        """The class of its options, as module:Class."""
        return f"cluster.draft.{self.settings or self.named}Options"


@frozen
class NoOptions:
    """Settings of an external drafter that has none."""


KINDS: Mapping[str, Kind] = {
    "lm": Kind("lm:LM", "options:LM", has_laws=True),
    "prompt_lookup": Kind("suffix:Suffix", "suffix:PromptLookup"),
    "suffix": Kind("suffix:Suffix"),
    "ngram_cache": Kind("suffix:Suffix", "suffix:NgramCache"),
    "prediction": Kind("suffix:Prediction"),
    "token_recycling": Kind("token_recycling:TokenRecycling", is_inside=True),
    "lookahead": Kind(
        "token_recycling:TokenRecycling",
        "token_recycling:Lookahead",
        is_inside=True,
    ),
    "early_exit": Kind("own_layers:EarlyExit", "options:EarlyExit", has_laws=True, is_inside=True),
    "layer_skip": Kind("own_layers:LayerSkip", "options:LayerSkip", has_laws=True, is_inside=True),
    "eagle3": Kind("eagle3:Eagle3", "options:Eagle3", is_inside=True),
    "peagle": Kind("head_drafter:Peagle", "options:Peagle", is_inside=True),
    "medusa": Kind("head_drafter:Medusa", "options:Medusa", is_inside=True),
    "block": Kind("head_drafter:Block", "options:Block", is_inside=True),
    "mtp": Kind("eagle3:Mtp", "options:Mtp", is_inside=True),
    "grammar": Kind("grammar:Grammar", is_inside=True),
    CASCADE: Kind("cascade:Cascade", "options:Cascade"),
    RECORDER: Kind("recorder:Recorder", "options:Recorder", is_inside=True),
}
_EXTERNAL = Kind("")  # what is believed of somebody else's
# Those that cost nothing until a request has what they are for, a grammar or a prediction.
_ALWAYS = ("grammar", "prediction")
# What replaces kinds that are gone.
REMOVED: Mapping[str, str] = {
    "openai": "serve a small model as kind: lm, or use the look-ups of kind: suffix"
}


def check(name: str, config: DrafterConfig) -> Any:
    """Parse the options of drafter `name` strictly; returns an instance of its options class.

    Raises ConfigError with a path that starts with drafters.NAME.
    """
    path = f"drafters.{name}.kind"
    if ":" in config.kind:
        options = _external_options(config.kind, path)
    else:
        check_that(config.kind, path, f"missing; known kinds: {', '.join(KINDS)}")
        if config.kind in REMOVED:
            raise ConfigError.at(path, f"this kind is gone; {REMOVED[config.kind]}")
        check_known(config.kind, KINDS, path, f"unknown kind {config.kind!r}", "known kinds")
        options = _resolve(KINDS[config.kind].options)
        if KINDS[config.kind].is_inside:
            config.check_resident(f"drafters.{name}", f"kind: {config.kind}")
    return parse(options, config.options, f"drafters.{name}.options")


def drafters_of(drafts: Sequence[str], target: str) -> dict[str, dict[str, Any]]:
    """Return the `drafters` of a configuration.

    drafts: each a kind that needs no model (`suffix`), a draft model, `KIND=MODEL` for one of
    another kind (`eagle3=FOLDER`), or `module:Class`.  target: its model, part of which `mtp` is.
    """
    found: dict[str, dict[str, Any]] = {}
    for draft in dict.fromkeys((*drafts, *_ALWAYS)):
        kind, _, model = draft.rpartition("=")
        if not kind:
            kind, model = (draft, "") if draft in KINDS or _is_class(draft) else ("lm", draft)
        options: dict[str, Any] = {}
        if kind == "lm":
            options = {"engine": {"model": model, "memory_fraction": 0.1}}
        elif model or kind == "mtp":
            options = {"model": model or target}
        name = kind.rpartition(":")[2]
        others = (f"{name}{number}" for number in itertools.count(2))
        free = next(each for each in itertools.chain([name], others) if each not in found)
        found[free] = {"kind": kind, "options": options}
    return found


def _is_class(draft: str) -> bool:
    module, _, name = draft.partition(":")
    return name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def has_laws(kind: str) -> bool:
    """True if drafters of a kind draw their drafts, and their word about the laws is believed."""
    return KINDS.get(kind, _EXTERNAL).has_laws


def refused_here(drafters: Iterable[str]) -> dict[str, str]:
    """Those of these drafters that cannot draft in this process, with the reason."""
    return {} if trees.is_available() else dict.fromkeys(drafters, NEEDED)


def refusals(refused: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each reason, with all that is refused for it.

    refused: reasons by the names of drafters, or of other parts, which have a dot."""
    for reason in dict.fromkeys(refused.values()):
        names = [name for name, why in refused.items() if why == reason]
        told = [name if "." in name else f"drafter {name}" for name in names]
        yield f"{', '.join(told)} {'are' if told[1:] else 'is'} refused: {reason}"


def search_in(*folders: Path) -> None:
    """Look for the modules of external drafters in these folders too, after all installed ones."""
    places = dict.fromkeys(str(folder.resolve()) for folder in folders)
    sys.path += [place for place in places if place not in sys.path]


def _external_options(kind: str, path: str) -> type[Any]:
    """The options class of the drafter `module:Class`; raises ConfigError if it is no drafter."""
    try:
        found = _resolve(kind)
    except (Exception, SystemExit) as error:  # whatever a user's module does when it is imported
        reason = f"{kind!r} cannot be loaded: {_told(error)}"
        module = kind.partition(":")[0]
        if isinstance(error, ModuleNotFoundError) and (error.name or "") in module:
            reason += "; put the file beside the configuration or into the working directory"
        else:
            reason += "; correct the module"
        raise ConfigError.at(path, reason) from error
    reason = _why_no_drafter(found)
    if reason:
        reason = f"{kind!r} is no drafter: {reason}; docs/own-drafter.md shows one"
        raise ConfigError.at(path, reason)
    options = getattr(found, "Options", NoOptions)
    if not (isinstance(options, type) and is_dataclass(options)):
        raise ConfigError.at(path, f"{kind}.Options is no dataclass; make it a frozen one")
    return options


def _why_no_drafter(found: Any) -> str:
    """Why an object can be no drafter, "" where it can."""
    for method in _METHODS:
        if not callable(getattr(found, method.__name__, None)):
            return f"it has no method {method.__name__}"
    if not isinstance(found, type):
        return "it is no class"
    if abstract := getattr(found, "__abstractmethods__", ()):
        return f"it has no method {min(abstract)}"
    if problem := _misfit(found, _CONSTRUCTOR):
        return f"its constructor {problem}"
    methods = [*_METHODS, *([TextDrafter.draft] if issubclass(found, TextDrafter) else ())]
    for method in methods:
        given = tuple(inspect.signature(method).parameters)
        if problem := _misfit(getattr(found, method.__name__), given):
            return f"its method {method.__name__} {problem}"
    return ""


def _misfit(called: Callable[..., Any], given: Sequence[str]) -> str:
    """Why `called` cannot be called with so many positional arguments, "" where it can."""
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # written in C: only the call itself tells
        return ""
    try:
        signature.bind(*given)
    except TypeError:
        taken = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        shown = inspect.Signature(taken)
        return f"takes {shown}, and is called with ({', '.join(given)})"
    return ""


def _told(error: BaseException) -> str:
    """An error of somebody else's code, with the line that raised it."""
    told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    place = next((each for each in reversed(frames) if "importlib" not in each.filename), None)
    if place is None or Path(place.filename) == Path(__file__):
        return told
    return f"{told} ({place.filename}, line {place.lineno})"


def create(
    name: str,
    config: DrafterConfig,
    context: DrafterContext,
) -> Drafter:
    """Build drafter `name`; load its model, if it has one.

    Raises ConfigError for wrong options, where there is no native code, for a model that cannot be
    served, and for one whose vocabulary differs from the target's.
    """
    options, found = check(name, config), drafter_class(config.kind)
    if reason := refused_here([name]).get(name):
        raise ConfigError(reason, param=f"drafters.{name}.kind")
    try:
        return cast(Drafter, found(context, options))
    except Exception as error:
        if isinstance(error, DrafthouseError) or config.kind in KINDS:
            raise
        path, told = f"drafters.{name}.kind", _told(error)
        raise ConfigError.at(path, f"{config.kind!r} raised when it was created: {told}") from error


def build(
    name: str,
    drafters: Mapping[str, DrafterConfig],
    context_of: Callable[[str], DrafterContext],
) -> Drafter:
    """Build drafter `name` of these, a cascade with its stages; see `create`."""
    context, settings = context_of(name), drafters[name]
    stages = {each: build(each, drafters, context_of) for each in settings.stages}
    return create(name, settings, replace(context, stages=stages))


def drafter_class(kind: str) -> type[Any]:
    """The class of a kind that `check` has passed."""
    return _resolve(KINDS[kind].drafter if kind in KINDS else kind)


def _resolve(location: str) -> Any:
    """Import the object at `location`: module:Class, or module:Class.attribute."""
    module, _, path = location.partition(":")
    return reduce(getattr, path.split("."), importlib.import_module(module))
