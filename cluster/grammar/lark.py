"""Structural tags (free text with constrained parts, as vLLM writes them) in Lark, the
language of llguidance.

Raises ValueError with the place of what is not served.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    body = rules.format(tag_format(tag), "format")
    return "\n".join(["%llguidance {}", f"start: {body}", *rules.lines])


def tag_format(tag: Mapping[str, Any]) -> Any:
    """The format of a structural tag, in the newer form."""
    if "format" in tag:
        return tag["format"]
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise ValueError("a structural tag has a format, or structures and triggers")
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": [
            {
                "begin": each.get("begin"),
                "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
                "end": each.get("end"),
            }
            for each in map(_object, structures)
        ],
    }


class _Rules:
    """Collects the rules of one grammar; every method returns an expression."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._specials = specials
        names = sorted(specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self._depth = 0

    def format(self, value: Any, path: str) -> str:
        if not isinstance(value, dict):
            raise ValueError(f"{path} is not an object with a type")
        kind = str(value.get("type"))
        if kind not in _KINDS:
            raise ValueError(f"{path}.type is {kind[:40]!r}; use one of {', '.join(_KINDS)}")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"{path[:60]} is nested deeper than {_MAX_DEPTH} formats")
        found = _KINDS[kind](self, value, path)
        self._depth -= 1
        return found

    def _new(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def _text(self, value: Any, path: str) -> str:
        """A constant text, its special tokens as tokens."""
        if not isinstance(value, str):
            raise ValueError(f"{path} is not a text")
        parts: list[str] = []
        start = 0
        for match in self._special.finditer(value) if self._special else ():
            if match.start() > start:
                parts.append(json.dumps(value[start : match.start()]))
            parts.append(f"<[{self._specials[match.group()]}]>")
            start = match.end()
        if start < len(value) or not parts:
            parts.append(json.dumps(value[start:]))
        return " ".join(parts)

    def _const_string(self, value: Mapping[str, Any], path: str) -> str:
        return self._text(value.get("value"), f"{path}.value")

    def _json_schema(self, value: Mapping[str, Any], path: str) -> str:
        schema = servable(value.get("json_schema"), f"{path}.json_schema")
        return self._new(f"%json {json.dumps(schema)}")

    def _regex(self, value: Mapping[str, Any], path: str) -> str:
        pattern = value.get("pattern")
        if not isinstance(pattern, str):
            raise ValueError(f"{path}.pattern is not a text")
        return f"/{regex_to_lark(pattern)}/"

    def _joined(self, value: Mapping[str, Any], path: str) -> str:
        elements = enumerate(_listed(value, "elements", path))
        found = [self.format(each, f"{path}.elements[{index}]") for index, each in elements]
        return f"({_SEPARATORS[value['type']].join(found)})"

    def _repeated(self, value: Mapping[str, Any], path: str) -> str:
        content = self.format(value.get("content"), f"{path}.content")
        return f"({content}){_REPEATS[value['type']]}"

    def _tag(self, value: Mapping[str, Any], path: str) -> str:
        begin = self._text(value.get("begin"), f"{path}.begin")
        return self._new(f"{begin} {self._rest(value, path)}")

    def _rest(self, tag: Mapping[str, Any], path: str) -> str:
        """The expression behind the beginning of a tag."""
        content, end = tag.get("content"), _optional_text(tag, "end", path)
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            # Text up to its end: as little as there is.
            return self._new(f"{_ANY} {self._text(end, f'{path}.end')}", "[lazy]")
        body = self.format(content, f"{path}.content")
        return f"{body} {self._text(end, f'{path}.end')}" if end else body

    def _tags_with_separator(self, value: Mapping[str, Any], path: str) -> str:
        tags = self._new(" | ".join(self._tags(value, path)))
        separator = _optional_text(value, "separator", path)
        between = f"{self._text(separator, f'{path}.separator')} " if separator else ""
        body = tags if value.get("stop_after_first") else f"{tags} ({between}{tags})*"
        return f"({body})" if value.get("at_least_one") else f"({body})?"

    def _triggered_tags(self, value: Mapping[str, Any], path: str) -> str:
        triggers = _listed(value, "triggers", path)
        found: list[str] = []
        for index, tag in enumerate(_listed(value, "tags", path)):
            place = f"{path}.tags[{index}]"
            begin = str(tag.get("begin")) if isinstance(tag, dict) else ""
            own = [each for each in triggers if begin.startswith(str(each))]
            if len(own) != 1:
                raise ValueError(f"{place}.begin does not begin with one of the triggers")
            rest = begin[len(own[0]) :]
            body = (self._text(rest, place) + " " if rest else "") + self._rest(tag, place)
            # Free text, up to and with the first trigger in it.
            if own[0] in self._specials:
                found.append(self._new(f"TAG_TEXT {self._text(own[0], place)} {body}"))
            else:
                head = self._new(f"TAG_TEXT {self._text(own[0], place)}", "[lazy]")
                found.append(self._new(f"{head} {body}"))
        if "TAG_TEXT: " + _ANY not in self.lines:
            self.lines.append("TAG_TEXT: " + _ANY)
        tags = f"({' | '.join(found)})"
        once = "" if value.get("at_least_one") else "?"
        if value.get("stop_after_first"):
            return tags if not once else f"({tags} | TAG_TEXT)"
        return f"{tags}{'+' if not once else '*'} {self._new('TAG_TEXT')}"

    def _tags(self, value: Mapping[str, Any], path: str) -> list[str]:
        tags = _listed(value, "tags", path)
        found = []
        for index, tag in enumerate(tags):
            if not isinstance(tag, dict):
                raise ValueError(f"{path}.tags[{index}] is not an object")
            found.append(self._tag(tag, f"{path}.tags[{index}]"))
        return found


_SEPARATORS = {"sequence": " ", "or": " | "}
_REPEATS = {"optional": "?", "star": "*", "plus": "+"}
_KINDS: Mapping[str, Callable[[_Rules, Mapping[str, Any], str], str]] = {
    "const_string": _Rules._const_string,
    "json_schema": _Rules._json_schema,
    "regex": _Rules._regex,
    "any_text": lambda rules, value, path: _ANY,
    **dict.fromkeys(_SEPARATORS, _Rules._joined),
    **dict.fromkeys(_REPEATS, _Rules._repeated),
    "tag": _Rules._tag,
    "tags_with_separator": _Rules._tags_with_separator,
    "triggered_tags": _Rules._triggered_tags,
}


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("an element of structures is not an object")
    return value


def _optional_text(value: Mapping[str, Any], key: str, path: str) -> str:
    """ "" where it is absent or null."""
    found = value.get(key)
    if found is not None and not isinstance(found, str):
        raise ValueError(f"{path}.{key} is not a text")
    return found or ""


def _listed(value: Mapping[str, Any], key: str, path: str) -> Sequence[Any]:
    found = value.get(key)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{path}.{key} is not a list with at least one element")
    return found
