"""The section `answers` of the configuration: what answers may be held to, and how they are read.

Below `cluster.config.schema`, which has all the other sections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class AnswersConfig:
    """How answers are held to a grammar, and how tool calls and reasoning are found in them.

    grammar_backend: the library that compiles grammars; xgrammar needs `pip install
    drafthouse[xgrammar]`.
    max_grammar_bytes: requests with a longer schema or grammar are answered 400.
    grammar_timeout_s: one that takes longer to compile is answered 400.
    tool_parser: the format of the model's tool calls (hermes, llama3, mistral, deepseek or
    harmony).  auto = what its chat template shows; none = tools are refused.
    reasoning_parser: how the model marks its reasoning (think or harmony).  auto = what its chat
    template shows; none = reasoning stays a part of the answer.
    chat_template: a file with a Jinja template in place of the model's own, below the working
    directory or the repository; for a model whose own has no place for tools, say.
    """

    grammar_backend: Literal["llguidance", "xgrammar"] = "llguidance"
    max_grammar_bytes: int = 256 * 1024
    grammar_timeout_s: float = 2.0
    tool_parser: Literal["auto", "none", "hermes", "llama3", "mistral", "deepseek", "harmony"] = (
        "auto"
    )
    reasoning_parser: Literal["auto", "none", "think", "harmony"] = "auto"
    chat_template: str = ""
