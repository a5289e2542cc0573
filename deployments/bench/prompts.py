"""The prompts of a load: a file as `drafthouse evaluate` reads it, or everyday questions."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from deployments.evaluate.prompts import EvaluatedPrompt, read_prompts

# Everyday questions, asked where nobody names one; long enough answers, of several kinds.

QUESTIONS = (
    "How do vaccines work? Explain it to a ten-year-old.",
    "Write a Python function that finds the longest common prefix of a list of strings.",
    "What should I pack for a week of hiking in the mountains?",
    "Summarise the plot of Romeo and Juliet in one paragraph.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Show the steps.",
    "Compare tea and coffee: where they come from, how they are made, what they do to you.",
    "Write a friendly e-mail that moves a meeting from Tuesday to Thursday.",
    "List the planets of the solar system as a JSON array with name and number of moons.",
    "Rewrite in plain English: the aforementioned party shall forthwith remit the outstanding sum.",
    "Why is the sky blue, and why is it red in the evening?",
    "Translate into French: We would like a table for four by the window, please.",
    "Explain the difference between a process and a thread, with an example of each.",
    "Write an SQL query that finds the three customers who spent most last year.",
    "Give me a recipe for vegetable soup, with amounts for four people.",
    "What are the arguments for and against a four-day working week?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
)


def prompts(path: Path | None, count: int | None, *, is_chat: bool) -> list[dict[str, Any]]:
    """`count` prompts, the first again where there are fewer; None = all, each once.

    Each is the field of a request that holds it.  Raises ConfigError for a file with a bad line.
    """
    found: list[dict[str, Any]] = []
    for prompt in read_prompts(path, ()) if path else map(EvaluatedPrompt, QUESTIONS):
        said = ({"role": "user", "content": prompt.text},)
        if is_chat:
            found.append({"messages": prompt.messages or said})
        elif prompt.messages in ((), said):
            found.append({"prompt": prompt.text})
        else:
            raise ConfigError(
                f"{path}: messages are for the chat endpoint; leave out --endpoint completions"
            )
    return list(islice(cycle(found), len(found) if count is None else count))
