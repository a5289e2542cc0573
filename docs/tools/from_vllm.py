"""The tables of docs/from-vllm.md: what vLLM's users know, and what it is here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cluster.metrics.vllm_metrics import IMITATED, PREFIX, RECORDED
from deployments.ingress.api.pages import ENDPOINTS
from deployments.ingress.wording import Status
from deployments.vllm_options import ANSWERS, KEYS, METHODS, SETTINGS
from docs.tools.fields import rules_of
from docs.tools.markdown import table

# What vLLM's documentation (Online Serving, OpenAI-compatible server, 0.32) lists as extra
# parameters.
_SAMPLING = (
    "use_beam_search",
    "top_k",
    "min_p",
    "repetition_penalty",
    "length_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "allowed_token_ids",
    "prompt_logprobs",
    "bad_words",
    "add_special_tokens",
    "structured_outputs",
    "priority",
    "request_id",
    "logits_processors",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "cache_salt",
    "kv_transfer_params",
    "vllm_xargs",
    "repetition_detection",
    "stream_options.continuous_usage_stats",
)
FIELDS: Mapping[str, tuple[str, ...]] = {
    "/tokenize": (
        "model",
        "prompt",
        "messages",
        "add_special_tokens",
        "return_token_strs",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "mm_processor_kwargs",
        "media_io_kwargs",
    ),
    "/detokenize": ("model", "tokens"),
    "/v1/completions": (*_SAMPLING, "prompt_embeds", "response_format"),
    "/v1/chat/completions": (
        *_SAMPLING,
        "echo",
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "mm_processor_kwargs",
        "media_io_kwargs",
        "include_reasoning",
        "thinking_token_budget",
    ),
}


def tables() -> str:
    """Options, methods of drafting, metrics and fields, side by side."""
    titled = {
        "Options": table(("vLLM's option", "setting here", "meaning"), _options()),
        "Methods": table(("`method`", "`kind` of the drafter", "`model`"), _methods()),
        "Metrics": table(("vLLM's name", "here it is"), _metrics()),
        "Fields": table(("field of vLLM's", "here", "instead"), _fields()),
    }
    return "\n".join(f"### {title}\n\n{told}" for title, told in titled.items())


def _options() -> Iterator[tuple[str, ...]]:
    for option, (settings, about) in SETTINGS.items():
        yield f"`--{option}`", ", ".join(f"`{setting}`" for setting in settings), about
    yield "`--lora-modules`", "`target.engine.adapters`", "LoRA adapters by name, `NAME=FOLDER`"
    for option, answer in ANSWERS.items():
        yield f"`--{option}`", "", f"not here: {answer}"


def _methods() -> Iterator[tuple[str, ...]]:
    for method, (kind, has_model) in METHODS.items():
        yield f"`{method}`", f"`{kind}`", "required" if has_model else "none"
    for key, setting in KEYS.items():
        yield f"`{key}` beside it", f"`{setting.format('NAME')}`", ""


def _metrics() -> Iterator[tuple[str, str]]:
    for each in IMITATED:
        label = f" by `{each.of}`" if each.of else ""
        yield f"`{PREFIX}{each.name}`", f"the sum of `{each.source.name}`{label}"
    yield ", ".join(f"`{metric.name}`" for metric in RECORDED), "recorded under these names alone"


def _fields() -> Iterator[tuple[str, str, str]]:
    """Those that are not supported, each once, with the first endpoint's words."""
    found = {
        rule.name: (f"`{rule.name}`", rule.status.value, rule.note)
        for endpoint in reversed(ENDPOINTS)
        for rule in rules_of(endpoint)
        if rule.name in FIELDS.get(endpoint.path, ()) and rule.status is not Status.SUPPORTED
    }
    yield from sorted(found.values())
