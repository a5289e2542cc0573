"""The prompts of a load: a file of one JSON object a line, or everyday questions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from deployments.questions import QUESTIONS

_EXPECTED = 'expected an object with "prompt" (a text), "messages", or "turns" (a list of texts)'


def prompts(path: Path | None, count: int | None, *, is_chat: bool) -> list[dict[str, Any]]:
    """`count` prompts, the first again where there are fewer; None = all, each once.

    Each is the field of a request that holds it.  Raises ConfigError with the number of a bad line.
    """
    found = _read(path, is_chat) if path else [_field(text, is_chat) for text in QUESTIONS]
    return list(islice(cycle(found), len(found) if count is None else count))


def _read(path: Path, is_chat: bool) -> Sequence[dict[str, Any]]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(_prompt(json.loads(line), is_chat))
            except (ValueError, LookupError, TypeError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
    if not found:
        raise ConfigError(f"{path}: no prompt in it; {_EXPECTED} on each line")
    return found


def _prompt(line: Any, is_chat: bool) -> dict[str, Any]:
    if not isinstance(line, Mapping):
        raise TypeError(_EXPECTED)
    if isinstance(line.get("prompt"), str):
        return _field(line["prompt"], is_chat)
    if isinstance(line.get("messages"), list):
        if not is_chat:
            raise ValueError("messages are for the chat endpoint; leave out --endpoint completions")
        return {"messages": line["messages"]}
    if isinstance(line.get("turns"), list) and line["turns"]:
        return _field(str(line["turns"][0]), is_chat)
    raise ValueError(_EXPECTED)


def _field(text: str, is_chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
