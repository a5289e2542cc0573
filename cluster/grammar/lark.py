"""Structural tags (free text with constrained parts, as vLLM writes them) in Lark, the
language of llguidance.

Raises ValueError with the place of what is not served.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llguidance import regex_to_lark

from cluster.grammar.json_schema import servable

_ANY = r"/(.|\n)*/"
_MAX_DEPTH = 32


def structural_tag_to_lark(tag: Any, specials: Mapping[str, int]) -> str:
    """tag: {"type": "structural_tag", "format": ...}, or the older form with "structures" and
    "triggers".  specials: ids of the special tokens, which no text matches, by their text."""
    if not isinstance(tag, dict):
        raise ValueError("a structural tag is an object")
    rules = _Rules(specials)
    body = rules.format(_Part(tag_format(tag), "format"))
    return "\n".join(["%llguidance {}", f"start: {body}", *rules.lines])


def tag_format(tag: Mapping[str, Any]) -> Any:
    """The format of a structural tag, in the newer form."""
    if "format" in tag:
        return tag["format"]
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise ValueError("a structural tag has a format, or structures and triggers")
    if not all(isinstance(each, dict) for each in structures):
        raise ValueError("an element of structures is not an object")
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": [
            {
                "begin": each.get("begin"),
                "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
                "end": each.get("end"),
            }
            for each in structures
        ],
    }


class _Part(NamedTuple):
    """A part of a structural tag, and where it stands."""

    value: Any
    path: str

    def field(self, key: str) -> _Part:
        """Of an object, which this must be; its value is None where it is absent."""
        if not isinstance(self.value, dict):
            raise ValueError(f"{self.path} is not an object")
        return _Part(self.value.get(key), f"{self.path}.{key}")

    def elements(self, key: str) -> list[_Part]:
        found, path = self.field(key)
        if not isinstance(found, list) or not found:
            raise ValueError(f"{path} is not a list with at least one element")
        return [_Part(each, f"{path}[{index}]") for index, each in enumerate(found)]

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise ValueError(f"{self.path} is not a text")
        return self.value


class _Rules:
    """Collects the rules of one grammar; every method returns an expression."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        self.lines = [f"TAG_TEXT: {_ANY}"]
        self._specials = specials
        names = sorted(specials, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")
        self._depth = 0

    def format(self, part: _Part) -> str:
        value, path = part
        if not isinstance(value, dict):
            raise ValueError(f"{path} is not an object with a type")
        kind = str(value.get("type"))
        if kind not in _KINDS:
            raise ValueError(f"{path}.type is {kind[:40]!r}; use one of {', '.join(_KINDS)}")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"{path[:60]} is nested deeper than {_MAX_DEPTH} formats")
        found = _KINDS[kind](self, part)
        self._depth -= 1
        return found

    def _new(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def _text(self, text: str) -> str:
        """A constant text, its special tokens as tokens."""
        parts = [
            f"<[{self._specials[part]}]>" if part in self._specials else json.dumps(part)
            for part in self._special.split(text)
            if part
        ]
        return " ".join(parts) or '""'

    def _optional(self, part: _Part) -> str:
        """ "" where it is absent, null or empty."""
        text = "" if part.value is None else part.text()
        return self._text(text) if text else ""

    def _json_schema(self, part: _Part) -> str:
        return self._new(f"%json {json.dumps(servable(*part.field('json_schema')))}")

    def _joined(self, part: _Part) -> str:
        separator = _SEPARATORS[part.value["type"]]
        return f"({separator.join(map(self.format, part.elements('elements')))})"

    def _repeated(self, part: _Part) -> str:
        return f"({self.format(part.field('content'))}){_REPEATS[part.value['type']]}"

    def _tag(self, part: _Part) -> str:
        return self._new(f"{self._text(part.field('begin').text())} {self._rest(part)}")

    def _rest(self, tag: _Part) -> str:
        """The expression behind the beginning of a tag."""
        content, end = tag.field("content"), self._optional(tag.field("end"))
        if isinstance(content.value, dict) and content.value.get("type") == "any_text" and end:
            # Text up to its end: as little as there is.
            return self._new(f"{_ANY} {end}", "[lazy]")
        body = self.format(content)
        return f"{body} {end}" if end else body

    def _tags_with_separator(self, part: _Part) -> str:
        tags = self._new(" | ".join(map(self._tag, part.elements("tags"))))
        separator = self._optional(part.field("separator"))
        between = f"{separator} " if separator else ""
        body = tags if part.value.get("stop_after_first") else f"{tags} ({between}{tags})*"
        return f"({body})" if part.value.get("at_least_one") else f"({body})?"

    def _triggered_tags(self, part: _Part) -> str:
        triggers = [each.text() for each in part.elements("triggers")]
        found: list[str] = []
        for tag in part.elements("tags"):
            begin = tag.field("begin").text()
            own = [each for each in triggers if begin.startswith(each)]
            if len(own) != 1:
                raise ValueError(f"{tag.path}.begin does not begin with one of the triggers")
            trigger = self._text(own[0])
            rest = begin[len(own[0]) :]
            body = (self._text(rest) + " " if rest else "") + self._rest(tag)
            # Free text, up to and with the first trigger in it.
            if own[0] in self._specials:
                found.append(self._new(f"TAG_TEXT {trigger} {body}"))
            else:
                head = self._new(f"TAG_TEXT {trigger}", "[lazy]")
                found.append(self._new(f"{head} {body}"))
        tags, is_needed = f"({' | '.join(found)})", part.value.get("at_least_one")
        if part.value.get("stop_after_first"):
            return tags if is_needed else f"({tags} | TAG_TEXT)"
        return f"{tags}{'+' if is_needed else '*'} {self._new('TAG_TEXT')}"


_SEPARATORS = {"sequence": " ", "or": " | "}
_REPEATS = {"optional": "?", "star": "*", "plus": "+"}
_KINDS: Mapping[str, Callable[[_Rules, _Part], str]] = {
    "const_string": lambda rules, part: rules._text(part.field("value").text()),
    "json_schema": _Rules._json_schema,
    "regex": lambda rules, part: f"/{regex_to_lark(part.field('pattern').text())}/",
    "any_text": lambda rules, part: _ANY,
    **dict.fromkeys(_SEPARATORS, _Rules._joined),
    **dict.fromkeys(_REPEATS, _Rules._repeated),
    "tag": _Rules._tag,
    "tags_with_separator": _Rules._tags_with_separator,
    "triggered_tags": _Rules._triggered_tags,
}
