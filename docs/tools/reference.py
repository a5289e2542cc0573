"""docs/configuration.md, metrics.md and events.md: what the library itself is the source of."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import pkgutil
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from cluster import metrics
from cluster.config.doors import ClientKey, KeysFile, RateLimits
from cluster.config.live import READ_BY
from cluster.config.parse import key_of
from cluster.config.schema import Config, DrafterConfig
from cluster.coordinator.watch import EVENTS, Drafts, StepEvent
from cluster.draft.registry import KINDS
from cluster.metrics import vllm_metrics
from docs.tools.markdown import DOCS, table
from docs.tools.texts import (
    CONFIGURATION,
    CONFIGURATION_FILE,
    EVENTS_HEAD,
    LIVE,
    METRICS,
    TEN,
    VLLM_METRICS,
)

# The parts of the files that keys name.
_FILES = {
    "access.keys_file`": KeysFile,
    "access.keys_file`: `keys.NAME`": ClientKey,
    "access.keys_file`: `classes.NAME`": RateLimits,
}


def pages() -> dict[Path, str]:
    """Path and text of every generated page."""
    return {
        DOCS / "configuration.md": configuration_page(),
        DOCS / "metrics.md": metrics_page(),
        DOCS / "events.md": events_page(),
    }


def metrics_page() -> str:
    """docs/metrics.md: every metric with its definition."""
    imitated = (
        (f"`{vllm_metrics.PREFIX}{each.name}`", each.source.kind, each.label, _sum_of(each))
        for each in vllm_metrics.IMITATED
    )
    vllms = sorted([*map(_metric_cells, vllm_metrics.RECORDED), *imitated])
    head = ("metric", "kind", "labels", "definition")
    ours = table(head, map(_metric_cells, metrics.ALL))
    return METRICS + ours + VLLM_METRICS + table(head, vllms)


def _metric_cells(metric: metrics.Metric) -> tuple[str, ...]:
    return f"`{metric.name}`", metric.kind, ", ".join(metric.labels), metric.help


def _sum_of(imitation: vllm_metrics.Imitation) -> str:
    words = ", ".join(
        f"{word} = {value}" for value, word in imitation.words.items() if value not in ("", word)
    )
    return f"The sum of `{imitation.source.name}`{f'; {words}' if words else ''}."


def events_page() -> str:
    """docs/events.md: every event of /ui/events with its fields."""
    titled = [(f"`{name}`", kind) for name, kind in EVENTS.items()]
    titled += [(f"{kind.__name__}, an array in `rounds`", kind) for kind in (StepEvent, Drafts)]
    return "\n".join([EVENTS_HEAD, *(_event(title, kind) for title, kind in titled)])


def _event(title: str, kind: type[Any]) -> str:
    hints, meanings = typing.get_type_hints(kind), field_texts(kind)
    rows = ((f"`{name}`", _type_name(hint), meanings[name]) for name, hint in hints.items())
    return _titled(title, kind) + table(("field", "type", "meaning"), rows)


def _titled(title: str, kind: type[Any]) -> str:
    return f"## {title}\n\n{' '.join((inspect.getdoc(kind) or '').split())}\n\n"


def configuration_page() -> str:
    """docs/configuration.md: every key with type, default, range and meaning."""
    places: dict[type[Any], list[str]] = {}
    for path, kind in _sections(Config, ""):
        places.setdefault(kind, []).append(path)
    ten = table(("example", "what it decides"), ((f"`{key}`", told) for key, told in TEN))
    sections = [CONFIGURATION + ten + CONFIGURATION_FILE]
    for kind, paths in places.items():
        title = ", ".join(f"`{path}`" for path in paths) if paths[0] else "The top level"
        sections.append(_section(title, kind))
    for part, kind in _FILES.items():
        sections.append(_section(f"The file of `{part}", kind))
    readers = ((f"`{key}`", ", ".join(names)) for key, names in READ_BY.items())
    sections.append(LIVE + table(("key", "read by"), readers))
    for name, drafter in KINDS.items():
        options = pkgutil.resolve_name(drafter.options)
        sections.append(_section(f"`drafters.NAME.options` of kind `{name}`", options))
    return "\n".join(sections)


def _sections(kind: type[Any], path: str) -> Iterator[tuple[str, type[Any]]]:
    """Every dataclass of the schema with every path it stands at."""
    yield path, kind
    for field, hint in _fields(kind):
        below = f"{path}.{field.name}" if path else field.name
        parts = (hint, *typing.get_args(hint))
        section = next((each for each in parts if _is_section(each)), None)
        if section is DrafterConfig:
            below = f"{below}.NAME"
        if section is not None:
            yield from _sections(section, below)


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _fields(kind: type[Any]) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return [(field, hints[field.name]) for field in dataclasses.fields(kind)]


def _section(title: str, kind: type[Any]) -> str:
    meanings = field_texts(kind)
    rows = (
        (f"`{key_of(field)}`", _type_name(hint), _default(field), meanings[field.name])
        for field, hint in _fields(kind)
        # A section of the schema has a table of its own.
        if not (_is_section(hint) and kind.__module__.startswith("cluster.config."))
    )
    return _titled(title, kind) + table(("key", "type", "default", "meaning"), rows)


def field_texts(kind: type[Any]) -> dict[str, str]:
    """The text that stands below each field of a record or of its bases, "" where none does."""
    texts: dict[str, str] = {}
    for base in reversed([each for each in kind.__mro__ if _is_record(each)]):
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in itertools.pairwise([*definition.body, ast.Pass()]):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
                case ast.AnnAssign(target=ast.Name(name)), _:
                    texts[name] = ""
    return texts


def _is_record(kind: type[Any]) -> bool:
    return dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")  # a NamedTuple


def _type_name(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    plain = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "any"}
    if hint in plain:
        return plain[hint]
    if origin is Annotated:
        return " ".join((_type_name(arguments[0]), *map(str, arguments[1:])))
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments if choice != "")
    if origin in (tuple, list):
        return f"list of {_type_name(arguments[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "mapping" if arguments[1] is Any else f"mapping to {_type_name(arguments[1])}"
    if _is_section(hint):
        return "section"
    if isinstance(hint, type) and _is_record(hint):
        return hint.__name__
    return " or ".join("null" if part is type(None) else _type_name(part) for part in arguments)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        default = field.default
    else:
        return "required"
    if dataclasses.is_dataclass(default):
        return "as `target.engine`"
    if default in ("", {}, ()):
        return "empty"
    if default is None or isinstance(default, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[default]
    return f"`{default}`"
