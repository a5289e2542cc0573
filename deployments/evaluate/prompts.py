"""Reads the prompts of `drafthouse evaluate` and `bench`: JSON, one a line, in any of three forms.

    {"prompt": "...", "task": "code", "segment": "trial"}          our own
    {"question_id": 81, "category": "writing", "turns": ["..."]}   Spec-Bench's; its first turn
    {"messages": [...], "temperature": 0.7, "metadata": {...}}     an OpenAI body, or with "prompt",
                                                                   also as "body" of a batch's line

task and segment stand at the top or in metadata.  A category is the task where the configuration
has such a task class.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cluster.core import DEFAULT_TASK
from cluster.errors import ConfigError, reason_of
from cluster.records import frozen

_FORMS = 'one JSON object with "prompt", "messages" or "turns"'


@frozen
class EvaluatedPrompt:
    """text: of a completion, or of the user's message; messages: of a conversation, () = text is
    the whole prompt.  temperature, max_tokens: None = not said."""

    text: str
    messages: tuple[Mapping[str, Any], ...] = ()
    task: str = DEFAULT_TASK
    segment: str = ""
    temperature: float | None = None
    max_tokens: int | None = None


def read_prompts(path: Path, tasks: Collection[str]) -> list[EvaluatedPrompt]:
    """tasks: the configuration's task classes; any other is the default one.

    Raises ConfigError with file and line."""
    try:
        lines = path.read_text("utf-8").split("\n")  # texts may hold what else ends a line
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(_prompt(json.loads(line), tasks))
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise ConfigError(
                    f"{path}, line {number}: not a prompt ({error}); send {_FORMS}"
                ) from error
    if not found:
        raise ConfigError(f"{path}: there is no prompt; send {_FORMS} a line")
    return found


def _prompt(line: Any, tasks: Collection[str]) -> EvaluatedPrompt:
    if not isinstance(line, Mapping):
        raise TypeError("it is no object")
    body = line.get("body", line)
    metadata = body.get("metadata") or {}
    task = str(body.get("task") or metadata.get("task") or body.get("category") or "")
    messages: tuple[Mapping[str, Any], ...] = ()
    if "messages" in body:
        messages = tuple(dict(each) for each in body["messages"])
        text = str(messages[-1]["content"])
    elif "turns" in body:
        text = str(body["turns"][0])
        messages = ({"role": "user", "content": text},)
    else:
        text = body.get("prompt")
        if not isinstance(text, str):
            raise ValueError("its prompt is no text" if text else "it has none of them")
    temperature = body.get("temperature")
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    return EvaluatedPrompt(
        text,
        messages,
        task if task in tasks else DEFAULT_TASK,
        str(body.get("segment") or metadata.get("segment") or ""),
        None if temperature is None else float(temperature),
        None if max_tokens is None else int(max_tokens),
    )
