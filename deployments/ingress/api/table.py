"""The contract: every field of every request body, field by field.  docs/api.md is this table."""

from __future__ import annotations

import dataclasses

from cluster.spec.beam_params import MAX_LENGTH_PENALTY
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

MAX_TOKENS = 2**31 - 1
MAX_STOP_LEN = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 128
# OpenAI's limits.
MAX_METADATA = 16
MAX_METADATA_KEY_LEN = 64
MAX_METADATA_VALUE_LEN = 512
# A key of 256 bytes in hexadecimal, or a long name.
MAX_SALT_LEN = 512
MAX_NAME_LEN = 256
MAX_TOKENS_PER_S = 1e6

_TOKEN = integer(0, "max_token_id")
_TOKENS = array(_TOKEN, min_items=1)
_STOP = text(MAX_STOP_LEN, 1)

MODEL = supported("model", text(MAX_NAME_LEN, 1), "a name that /v1/models lists", is_required=True)

SPECULATION = (
    supported("speculation", OBJECT, "this request's say over drafting"),
    supported("speculation.enabled", BOOLEAN, "false = plain decoding"),
    supported(
        "speculation.max_draft_tokens",
        integer(0, "max_draft_tokens"),
        "draft tokens checked per step, at most",
    ),
    supported(
        "speculation.drafters", array(text(MAX_NAME_LEN), 64), "names of those that may help"
    ),
    supported("speculation.latency_class", text(64), "one of ingress.public_latency_classes"),
    supported(
        "speculation.min_tokens_per_s",
        number(0, MAX_TOKENS_PER_S),
        "the speed for which drafts are granted to this request before others are served",
    ),
    supported(
        "speculation.law",
        text(64),
        "how drafts are accepted, one of coordinator.laws; under all but coupled the text depends "
        "on the drafts",
    ),
    supported("return_draft_sources", BOOLEAN, "whose drafts each token was"),
    supported("return_draft_trees", BOOLEAN, "each step's tree; only with a cache_salt or a key"),
)

# What holds an answer to a grammar; vLLM's older names of it.
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

# vLLM's, and transformers' early_stopping.
_BEAMS = (
    supported(
        "use_beam_search",
        BOOLEAN,
        "the n best texts are searched for, by best_of (else n) beams; nothing is drawn, so "
        "temperature and the like have no effect, and nothing is streamed",
    ),
    supported(
        "length_penalty",
        number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
        "of beam search: a text's score is its log-probability over its length to this power",
    ),
    supported(
        "early_stopping",
        one_of(BOOLEAN, {"enum": ["never"]}),
        "of beam search, as in transformers: true = it ends with its first texts",
    ),
)

# Of all endpoints that generate from OpenAI's sampling fields.
_SAMPLING = (
    supported("temperature", number(0, 2), "0 = greedy"),
    supported("top_p", {**number(0, 1), "exclusiveMinimum": 0}, "nucleus sampling"),
    supported("top_k", integer(-1, MAX_TOKENS), "candidates kept; 0 and -1 = all"),
    supported("min_p", number(0, 1), "least probability, relative to the greatest"),
    supported("presence_penalty", number(-2, 2), "counts output tokens"),
    supported("frequency_penalty", number(-2, 2), "counts output tokens"),
    supported(
        "repetition_penalty",
        {**number(0, 10), "exclusiveMinimum": 0},
        "counts prompt and output tokens",
    ),
    supported(
        "logit_bias",
        {
            "type": "object",
            "additionalProperties": number(-100, 100),
            "maxProperties": MAX_LOGIT_BIAS,
        },
        "token id to shift of its logit",
    ),
    supported(
        "seed", integer(-(2**63), 2**64 - 1), "with it the same request has the same text; "
        "absent or negative = one is drawn, and reported by each choice"
    ),
    supported("n", integer(1, "max_choices"), "samples per prompt"),
    supported(
        "stop",
        one_of(_STOP, array(_STOP, "max_stop_strings")),
        "the text ends before the first of these strings",
    ),
    supported(
        "stop_token_ids", array(_TOKEN, MAX_STOP_TOKEN_IDS), "tokens that end the text"
    ),
    supported("min_tokens", integer(0, MAX_TOKENS), "output tokens before the text may end"),
    supported("ignore_eos", BOOLEAN, "end-of-sequence tokens are ordinary ones"),
    supported("stream", BOOLEAN, "server-sent events"),
    supported("stream_options", OBJECT, "only with stream"),
    supported("stream_options.include_usage", BOOLEAN, "a last chunk with the usage"),
    supported("stream_options.continuous_usage_stats", BOOLEAN, "with it, every chunk has some"),
    ignored("stream_options.include_obfuscation", "chunks are never padded"),
    supported("user", text(MAX_NAME_LEN), "the segment, where it is one; it is not kept"),
    supported(
        "metadata",
        {
            "type": "object",
            "additionalProperties": text(MAX_METADATA_VALUE_LEN),
            "maxProperties": MAX_METADATA,
        },
        "`task` names the task class, which selects drafters, `segment` one of ingress.segments; "
        "other keys are not kept",
    ),
    supported("cache_salt", text(MAX_SALT_LEN, 1), "only texts under the same salt help this one"),
    supported("add_special_tokens", BOOLEAN, "whether text prompts get the model's own"),
    supported("return_token_ids", BOOLEAN, "token ids of prompt and output"),
    *SPECULATION,
    # vLLM's, of its sampling.
    supported("skip_special_tokens", BOOLEAN, "false = special tokens are part of the text"),
    supported("include_stop_str_in_output", BOOLEAN, "the text keeps the stop string that ends it"),
    ignored("spaces_between_special_tokens", "the tokenizers served do not use it", True),
    *_BEAMS,
    refused("allowed_token_ids", "remove it; use logit_bias", []),
    refused("bad_words", "remove it; use logit_bias", []),
    refused("logits_processors", "remove it; no code is taken from requests", []),
    supported(
        "truncate_prompt_tokens",
        integer(-1, MAX_TOKENS),
        "the prompt keeps its last so many tokens; -1 = as many as fit; 0 = all",
    ),
    supported("prompt_logprobs", integer(0, "max_logprobs"), "log-probabilities of the prompt's "
              "tokens, with so many alternatives; not for streams"),
    supported(
        "return_tokens_as_token_ids", BOOLEAN, "log-probabilities name tokens `token_id:N`"
    ),
    refused("priority", "remove it; use speculation.latency_class", 0),
    refused("request_id", "send the header X-Request-Id"),
    *STRUCTURED,
    refused("kv_transfer_params", "remove it; caches are not handed over"),
    refused("repetition_detection", "remove it; use max_tokens or penalties"),
    ignored("vllm_xargs", "arguments of vLLM's own plug-ins"),
)  # fmt: skip

# Of endpoints that answer with one text.
SAMPLING_OF_ONE = (
    *(
        rule
        for rule in _SAMPLING
        if not rule.name.startswith(
            ("n", "stream_options", "return_", "add_special_tokens", "prompt_logprobs")
        )
        and rule not in _BEAMS
    ),
    refused("use_beam_search", "remove it; it is served by /v1/completions and chat", False),
    refused("length_penalty", "remove it; it belongs to beam search", 1, 1.0),
)

# OpenAI's: they affect billing, caching or safety there, never the text.
HARMLESS = (
    ignored("service_tier", "there is one tier", "auto", "default"),
    ignored("store", "answers of this endpoint are never kept", False),
    ignored("safety_identifier", "not kept"),
    ignored("prompt_cache_key", "prefixes are found by their tokens; see cache_salt"),
    ignored("prompt_cache_retention", "prefixes are kept as long as there is room"),
    ignored("prompt_cache_options", "prefixes are found by their tokens"),
    refused("moderation", "remove it; no moderation is served"),
)

_CHAT_TEMPLATE = (
    supported("add_generation_prompt", BOOLEAN, "false = the answer's header is not added"),
    supported("continue_final_message", BOOLEAN, "the answer goes on with the last message"),
    refused("chat_template", "remove it; the tokenizer's own template is used"),
    supported("chat_template_kwargs", OBJECT, "arguments of the model's template"),
    refused("documents", "remove it; write them into a message", []),
    refused("mm_processor_kwargs", "remove it; only text is served", {}),
    refused("media_io_kwargs", "remove it; only text is served", {}),
)

_MESSAGES: tuple[Rule, ...] = (
    supported(
        "messages", array(OBJECT, MAX_MESSAGES, 1), "the conversation", is_required=True
    ),
    supported("messages[].role", text(64, 1), "system, developer, user, assistant or tool, and "
              "what else the model's template names", is_required=True),
    supported(
        "messages[].content",
        one_of(text(), array(OBJECT)),
        "a text, or text parts; only a message with tool_calls has none",
    ),
    supported("messages[].name", text(MAX_NAME_LEN), "for templates that use it"),
    refused("messages[].audio", "remove it; only text is served"),
    refused("messages[].function_call", "send tool_calls"),
    ignored("messages[].refusal", "what an earlier answer declined is no part of a prompt"),
    supported("messages[].tool_calls", array(OBJECT, MAX_TOOL_CALLS), "of an earlier answer"),
    supported("messages[].tool_call_id", text(MAX_NAME_LEN), "of a message of role tool"),
    supported("messages[].reasoning_content", text(), "the reasoning of an earlier answer, for "
              "templates that use it"),
)  # fmt: skip

COMPLETIONS = Endpoint(
    "/v1/completions",
    "Continue a prompt",
    (
        MODEL,
        supported(
            "prompt",
            one_of(text(min_len=1), array(text(min_len=1), None, 1), _TOKENS,
                   array(_TOKENS, None, 1)),
            "a text, token ids, or a list of either",
            is_required=True,
        ),
        supported("max_tokens", integer(0, MAX_TOKENS), "output tokens, at most; absent = 16; 0 "
                  "only with echo or prompt_logprobs"),
        supported(
            "logprobs", integer(0, "max_logprobs"), "log-probabilities, with so many alternatives"
        ),
        supported("echo", BOOLEAN, "the prompt comes before the text, with logprobs in them too"),
        supported("best_of", integer(1, "max_choices"),
                  "samples per prompt, of which the likeliest n per token are "
                  "answered with; not for streams"),
        refused("suffix", "remove it; the model only continues text", ""),
        refused("prompt_embeds", "remove it; send text or token ids"),
        *_SAMPLING,
        *HARMLESS,
    ),
)  # fmt: skip

CHAT = Endpoint(
    "/v1/chat/completions",
    "Answer a conversation",
    (
        MODEL,
        *_MESSAGES,
        supported(
            "max_completion_tokens",
            integer(0, MAX_TOKENS),
            "output tokens, at most; 0 only with prompt_logprobs",
        ),
        supported("max_tokens", integer(0, MAX_TOKENS), "the older name of max_completion_tokens"),
        supported("logprobs", BOOLEAN, "log-probabilities of the output"),
        supported("top_logprobs", integer(0, "max_logprobs"), "alternatives; needs logprobs"),
        refused("echo", "remove it; it belongs to /v1/completions", False),
        supported(
            "prediction", OBJECT, "the output that is expected, for drafters of kind prediction"
        ),
        supported("prediction.type", {"type": "string", "enum": ["content"]}, "content"),
        supported("prediction.content", one_of(text(), array(OBJECT)), "a text, or text parts"),
        refused("modalities", 'send ["text"] or remove it', ["text"]),
        refused("audio", "remove it; only text is served"),
        refused("verbosity", "remove it", "medium"),
        refused("web_search_options", "remove it; there is no web search"),
        *_CHAT_TEMPLATE,
        *TOOLS,
        *_SAMPLING,
        *HARMLESS,
    ),
)

_ANY_MODEL = supported("model", text(MAX_NAME_LEN, 1), "a name that /v1/models lists")

TOKENIZE = Endpoint(
    "/tokenize",
    "The tokens of a text or of a conversation",
    (
        _ANY_MODEL,
        supported("prompt", text(), "a text; this or messages"),
        *(
            dataclasses.replace(rule, is_required=rule.is_required and rule.name != "messages")
            for rule in _MESSAGES
        ),
        supported("add_special_tokens", BOOLEAN, "whether a text gets the model's own"),
        supported("return_token_strs", BOOLEAN, "each token as the vocabulary names it"),
        *_CHAT_TEMPLATE,
        *(rule for rule in TOOLS if rule.name == "tools"),
    ),
)

DETOKENIZE = Endpoint(
    "/detokenize",
    "The text of tokens",
    (_ANY_MODEL, supported("tokens", _TOKENS, "special ones have text too", is_required=True)),
)
