"""The prompts of a load: a file as `drafthouse evaluate` reads it, or everyday questions."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from deployments.evaluate.prompts import EvaluatedPrompt, read_prompts
from deployments.questions import QUESTIONS


def prompts(path: Path | None, count: int | None, *, is_chat: bool) -> list[dict[str, Any]]:
    """`count` prompts, the first again where there are fewer; None = all, each once.

    Each is the field of a request that holds it.  Raises ConfigError for a file with a bad line.
    """
    asked = read_prompts(path, ()) if path else list(map(EvaluatedPrompt, QUESTIONS))
    if not is_chat and any(prompt.messages not in ((), (_said(prompt),)) for prompt in asked):
        raise ConfigError(
            f"{path}: messages are for the chat endpoint; leave out --endpoint completions"
        )
    found = [_field(prompt, is_chat=is_chat) for prompt in asked]
    return list(islice(cycle(found), len(found) if count is None else count))


def _field(prompt: EvaluatedPrompt, *, is_chat: bool) -> dict[str, Any]:
    if not is_chat:
        return {"prompt": prompt.text}
    return {"messages": list(prompt.messages) or [_said(prompt)]}


def _said(prompt: EvaluatedPrompt) -> dict[str, str]:
    return {"role": "user", "content": prompt.text}
