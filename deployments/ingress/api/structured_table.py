"""The contract's fields that hold an answer to a grammar."""

from __future__ import annotations

from deployments.ingress.api.contract import (
    BOOLEAN,
    OBJECT,
    array,
    ignored,
    one_of,
    refused,
    supported,
    text,
)

_OLDER = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
    "guided_grammar": "grammar", "structural_tag": "structural_tag",
}  # fmt: skip

STRUCTURED = (
    supported("response_format", OBJECT, "what the answer must be: its type is text, json_object, "
              "json_schema or structural_tag"),
    supported("structured_outputs", OBJECT, "vLLM's: one of the following"),
    supported("structured_outputs.json", one_of(OBJECT, text()), "a JSON schema"),
    supported("structured_outputs.json_object", BOOLEAN, "any JSON object"),
    supported("structured_outputs.regex", text(), "a regular expression for the whole answer"),
    supported("structured_outputs.choice", array(text(), 4096, 1), "one of these texts"),
    supported("structured_outputs.grammar", text(), "a grammar in Lark, or in GBNF"),
    supported("structured_outputs.structural_tag", one_of(OBJECT, text()), "as in response_format"),
    ignored("structured_outputs.disable_any_whitespace", "JSON always has single spaces"),
    ignored("structured_outputs.disable_fallback", "nothing falls back"),
    ignored("structured_outputs.disable_additional_properties", "the schema says what it allows"),
    refused("structured_outputs.whitespace_pattern", "remove it; JSON has single spaces"),
    *(refused(old, f"send structured_outputs.{new}") for old, new in _OLDER.items()),
    refused("guided_decoding_backend", "remove it; answers.grammar_backend names the library"),
    refused("guided_whitespace_pattern", "remove it; JSON has single spaces"),
)  # fmt: skip

# Of chats.
TOOLS = (
    supported("tools", array(OBJECT, 128), "functions that the answer may call"),
    supported("tool_choice", one_of(text(), OBJECT), "none, auto, required, or a function; calls "
              "that are forced obey their schemas"),
    supported("parallel_tool_calls", BOOLEAN, "false = one call at most"),
    refused("functions", "send tools", []),
    refused("function_call", "send tool_choice", "none", "auto"),
    supported("reasoning_effort", text(16), "for the model's template, where that uses it"),
    supported("include_reasoning", BOOLEAN, "false = reasoning_content is left out"),
    refused("thinking_token_budget", "remove it; send max_tokens"),
)  # fmt: skip
