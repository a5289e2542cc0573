"""The fields of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from deployments.ingress.api.contract import (
    BOOLEAN,
    OBJECT,
    Endpoint,
    Rule,
    array,
    ignored,
    integer,
    number,
    one_of,
    refused,
    supported,
    text,
)
from deployments.ingress.api.table import (
    MAX_MESSAGES,
    MAX_STOP_LEN,
    MAX_TOKENS,
    MODEL,
    SPECULATION,
)

_CONVERSATION: tuple[Rule, ...] = (
    MODEL,
    supported("messages", array(OBJECT, MAX_MESSAGES, 1), "the conversation", is_required=True),
    supported(
        "messages[].role",
        text(64, 1),
        "user, assistant or system; a last assistant message is continued",
        is_required=True,
    ),
    supported(
        "messages[].content",
        one_of(text(), array(OBJECT)),
        "a text, or blocks: text, tool_use, tool_result",
        is_required=True,
    ),
    supported("system", one_of(text(), array(OBJECT)), "a text, or text blocks"),
    supported("tools", array(OBJECT, 128), "functions that the answer may call"),
    supported("tool_choice", OBJECT, "its type is auto, any, tool or none; calls that are forced "
              "obey their schemas"),
    supported("thinking", OBJECT, "enabled or adaptive = the reasoning has blocks of its own"),
    supported("thinking.type", text(16), "enabled, adaptive or disabled"),
    ignored("thinking.budget_tokens", "max_tokens bounds all of the output"),
    ignored("thinking.display", "reasoning is answered with as it is"),
    supported("output_config", OBJECT, "what the answer must be"),
    supported("output_config.format", OBJECT, "its type is json_schema"),
    supported("output_config.effort", text(16), "for the model's template, where that uses it"),
    refused("output_config.task_budget", "remove it; send max_tokens"),
    ignored("cache_control", "prefixes are found by their tokens"),
    ignored("speed", "there is one speed", "standard"),
    ignored("user_profile_id", "not kept"),
    ignored("workspace_id", "not kept"),
)  # fmt: skip

MESSAGES = Endpoint(
    "/v1/messages",
    "Answer a conversation, in the format of Anthropic's Messages",
    (
        *_CONVERSATION,
        supported("max_tokens", integer(1, MAX_TOKENS), "output tokens, at most", is_required=True),
        supported(
            "stop_sequences",
            array(text(MAX_STOP_LEN, 1), "max_stop_strings"),
            "the text ends before the first of these strings",
        ),
        supported("stream", BOOLEAN, "server-sent events"),
        supported("temperature", number(0, 2), "0 = greedy"),
        supported("top_p", {**number(0, 1), "exclusiveMinimum": 0}, "nucleus sampling"),
        supported("top_k", integer(-1, MAX_TOKENS), "candidates kept; 0 and -1 = all"),
        supported("metadata", OBJECT, "`task` names the task class; other keys are not kept"),
        supported("seed", integer(-(2**63), 2**64 - 1), "with it the same request has the same "
                  "text"),
        supported("cache_salt", text(512, 1), "only texts under the same salt help this one"),
        *(rule for rule in SPECULATION if not rule.name.startswith("return_")),
        ignored("service_tier", "there is one tier", "auto", "standard_only"),
        ignored("inference_geo", "there is one place"),
        ignored("diagnostics", "see /metrics"),
        refused("container", "remove it; no code is run"),
        refused("context_management", "remove it; send what is to be kept"),
        refused("mcp_servers", "remove it; send functions as tools", []),
    ),
)  # fmt: skip

COUNT_TOKENS = Endpoint(
    "/v1/messages/count_tokens", "How many tokens a conversation has", _CONVERSATION
)
