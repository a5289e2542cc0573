"""The fields of /v1/responses."""

from __future__ import annotations

from deployments.ingress.api.contract import (
    BOOLEAN,
    OBJECT,
    Endpoint,
    array,
    ignored,
    integer,
    one_of,
    refused,
    supported,
    text,
)
from deployments.ingress.api.table import (
    HARMLESS,
    MAX_MESSAGES,
    MAX_NAME_LEN,
    MAX_TOKENS,
    MODEL,
    SAMPLING_OF_ONE,
)

_ITEMS = (
    supported(
        "input",
        one_of(text(min_len=1), array(OBJECT, MAX_MESSAGES, 1)),
        "a text, or messages, function calls and their outputs",
        is_required=True,
    ),
    supported("input[].type", text(), "message, function_call, function_call_output, reasoning"),
    supported("input[].role", text(), "of a message: user, assistant, system or developer"),
    supported("input[].content", one_of(text(), array(OBJECT)), "of a message"),
    supported("input[].call_id", text(), "of a call and of its output"),
    supported("input[].name", text(), "of the function that was called"),
    supported("input[].arguments", text(), "of the call, as JSON"),
    supported("input[].output", one_of(text(), array(OBJECT)), "of the call"),
    ignored("input[].id", "items are not looked up"),
    ignored("input[].status", "items are taken as complete"),
    ignored("input[].phase", "not told to the model"),
    ignored("input[].async", "not told to the model"),
    ignored("input[].caller", "not told to the model"),
    ignored("input[].namespace", "not told to the model"),
    ignored("input[].summary", "the reasoning of earlier answers is no part of a prompt"),
    ignored("input[].encrypted_content", "the reasoning of earlier answers is no part of a prompt"),
)

RESPONSES = Endpoint(
    "/v1/responses",
    "Answer a conversation, in the format of OpenAI's Responses",
    (
        MODEL,
        *_ITEMS,
        supported("instructions", text(), "a system message before all others"),
        supported("max_output_tokens", integer(1, MAX_TOKENS), "output tokens, at most"),
        supported(
            "previous_response_id",
            text(MAX_NAME_LEN, 1),
            "the conversation goes on after this answer, if it is still kept "
            "(api.max_stored_responses)",
        ),
        supported("store", BOOLEAN, "false = the answer is not kept for previous_response_id"),
        supported(
            "include",
            array({"type": "string", "enum": ["message.output_text.logprobs"]}, 16),
            "log-probabilities, with top_logprobs alternatives",
        ),
        supported("top_logprobs", integer(0, "max_logprobs"), "alternatives per token"),
        ignored("stream_options", "chunks are never padded"),
        refused("background", "remove it; wait for the answer, or stream it", False),
        refused("context_management", "remove it; send what is to be kept"),
        refused("conversation", "remove it; use previous_response_id"),
        refused("prompt", "remove it; there are no stored prompts"),
        refused("image", "remove it; only text is served"),
        refused("access_programs", "remove it"),
        supported("reasoning", OBJECT, "how the model reasons"),
        supported("reasoning.effort", text(16), "for the model's template, where that uses it"),
        ignored("reasoning.summary", "reasoning is answered with as it is"),
        ignored("reasoning.generate_summary", "reasoning is answered with as it is"),
        ignored("reasoning.mode", "there is one mode"),
        ignored("reasoning.context", "the reasoning of earlier answers is no part of a prompt"),
        supported("text", OBJECT, "what the answer must be"),
        supported("text.format", OBJECT, "its type is text, json_object or json_schema"),
        ignored("text.verbosity", "not told to the model", "medium"),
        supported("tools", array(OBJECT, 128), "functions that the answer may call"),
        supported("tool_choice", one_of(text(), OBJECT), "none, auto, required, or a function; "
                  "calls that are forced obey their schemas"),
        supported("parallel_tool_calls", BOOLEAN, "false = one call at most"),
        ignored("max_tool_calls", "it bounds tools that the server runs, and it runs none"),
        refused("truncation", "remove it; send a shorter input", "disabled"),
        *SAMPLING_OF_ONE,
        *(rule for rule in HARMLESS if rule.name != "store"),
    ),
)  # fmt: skip
