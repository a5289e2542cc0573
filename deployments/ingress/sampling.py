"""Reads the fields of both OpenAI bodies: how to sample, when to stop, how to speculate."""

from __future__ import annotations

import dataclasses

from cluster.core import SamplingParams, SpeculationOptions
from cluster.errors import ForbiddenError, RequestError
from cluster.requests.acceptance_law import Law
from cluster.requests.seeds import asked_seed
from cluster.requests.tenant import DEFAULT_TENANT, tenant_of
from deployments.ingress.api.table import (
    MAX_LOGIT_BIAS,
    MAX_METADATA,
    MAX_METADATA_KEY_LEN,
    MAX_METADATA_VALUE_LEN,
    MAX_SALT_LEN,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS,
    MAX_TOKENS_PER_S,
)
from deployments.ingress.fields import Fields, encodable, shown
from deployments.ingress.spec import GenerationSpec, Limits, Prompt
from deployments.ingress.structured import read_grammar


def read_spec(
    fields: Fields,
    limits: Limits,
    prompts: tuple[Prompt, ...],
    num_choices: int,
    max_tokens: int | None,
    logprobs: int | None,
) -> GenerationSpec:
    """Read everything except the prompts and the format of the answer.

    max_tokens: None = not given, 0 = nothing is generated.
    """
    user, (task, segment) = fields.string("user", ""), _metadata(fields)
    _check_sequences(len(prompts), num_choices, limits)
    min_tokens = fields.integer("min_tokens", 0, 0, MAX_TOKENS) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError.at(
            "min_tokens",
            f"{min_tokens} exceeds the {max_tokens} tokens that may be generated; lower it",
        )
    defaults, (grammar, grammar_field) = limits.defaults, read_grammar(fields)
    tenant = _tenant(fields, limits)
    params = SamplingParams(
        temperature=fields.number("temperature", defaults.temperature, 0.0, 2.0),
        top_p=_top_p(fields, defaults.top_p),
        top_k=_top_k(fields, defaults.top_k),
        min_p=fields.number("min_p", defaults.min_p, 0.0, 1.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=_repetition_penalty(fields, defaults.repetition_penalty),
        logit_bias=_logit_bias(fields, limits),
        max_tokens=max_tokens or 0,
        min_tokens=min_tokens,
        stop_token_ids=fields.integers(
            "stop_token_ids", MAX_STOP_TOKEN_IDS, 0, limits.vocab_size - 1
        ),
        logprobs=logprobs,
        grammar=grammar,
    )
    return GenerationSpec(
        prompts=prompts,
        params=params,
        seed=asked_seed(fields.integer("seed", None, -(2**63), 2**64 - 1)),
        num_choices=num_choices,
        default_max_tokens=defaults.max_tokens,
        stop=_stop(fields, limits),
        include_stop=fields.boolean("include_stop_str_in_output", default=False),
        skip_special_tokens=fields.boolean("skip_special_tokens", default=True),
        truncate_prompt_tokens=fields.integer("truncate_prompt_tokens", 0, -1, MAX_TOKENS) or 0,
        ignore_eos=fields.boolean("ignore_eos", default=False),
        add_special_tokens=fields.boolean("add_special_tokens", default=True),
        task=limits.task_class(task or limits.default_task),
        segment=limits.segment_of(segment, user),
        speculation=dataclasses.replace(
            _speculation(fields.object("speculation"), limits),
            return_draft_sources=fields.boolean("return_draft_sources", default=False),
            return_draft_trees=_returns_trees(fields, tenant),
        ),
        tenant=tenant,
        adapter=limits.adapter_of(fields.string("model", "")),
        is_prompt_only=max_tokens == 0,
        grammar_field=grammar_field,
    )


def _check_sequences(num_prompts: int, num_choices: int, limits: Limits) -> None:
    total = num_prompts * num_choices
    if total > limits.max_sequences:
        name = "prompt" if num_prompts > 1 else "n"
        raise RequestError.at(
            name,
            f"{num_prompts} prompts times {num_choices} texts are {total} sequences, the "
            f"limit is {limits.max_sequences} (ingress.max_sequences_per_request); send fewer",
        )


def _tenant(fields: Fields, limits: Limits) -> bytes:
    salt = fields.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        # A client whose salt got lost must not share what it writes; the value is a secret.
        raise RequestError.at(
            "cache_salt", "it must be text that is not empty; send some or remove it"
        )
    return tenant_of(fields.string("cache_salt", "", MAX_SALT_LEN), limits.owner)


def _returns_trees(fields: Fields, tenant: bytes) -> bool:
    name = "return_draft_trees"
    is_asked = fields.boolean(name, default=False)
    if is_asked and tenant == DEFAULT_TENANT:
        raise RequestError.at(
            name,
            "rejected drafts of stores that all share show other people's text; send a cache_salt "
            "of your own with it",
        )
    return is_asked


def _top_p(fields: Fields, default: float) -> float:
    top_p = fields.number("top_p", default, 0.0, 1.0)
    if top_p == 0.0:
        raise RequestError.at(
            "top_p", "0 keeps no token; send more than 0, or temperature 0 for greedy decoding"
        )
    return top_p


def _top_k(fields: Fields, default: int) -> int:
    # vLLM's clients send -1 for our 0: keep every token.
    return max(fields.integer("top_k", default, -1, 2**31 - 1) or 0, 0)


def _repetition_penalty(fields: Fields, default: float) -> float:
    penalty = fields.number("repetition_penalty", default, 0.0, 10.0)
    if penalty == 0.0:
        raise RequestError.at(
            "repetition_penalty", "0 divides by zero; send more than 0, 1 for none"
        )
    return penalty


def _logit_bias(fields: Fields, limits: Limits) -> tuple[tuple[int, float], ...]:
    bias = fields.object("logit_bias")
    if bias is None:
        return ()
    keys = list(bias.values())
    if len(keys) > MAX_LOGIT_BIAS:
        raise RequestError.at("logit_bias", f"{len(keys)} entries; send at most {MAX_LOGIT_BIAS}")
    entries = []
    for key in keys:
        is_token = key.isascii() and key.isdigit() and len(key) < 10
        if not is_token or int(key) >= limits.vocab_size:
            raise RequestError.at(
                "logit_bias",
                f"{shown(key)} is not a token id; the vocabulary has {limits.vocab_size} tokens",
            )
        entries.append((int(key), bias.number(key, 0.0, -100.0, 100.0)))
    return tuple(sorted(dict(entries).items()))


def _stop(fields: Fields, limits: Limits) -> tuple[str, ...]:
    value = fields.get("stop")
    if isinstance(value, str):
        fields = Fields({"stop": [value]})
    stop = fields.strings("stop", limits.max_stop_strings) or ()
    if "" in stop:
        raise RequestError.at("stop", "an empty string would end every text; remove it")
    return stop


def _metadata(fields: Fields) -> tuple[str, str]:
    """Return what the metadata say of the task class and of the segment."""
    metadata = fields.object("metadata")
    if metadata is None:
        return "", ""
    keys = list(metadata.values())
    if len(keys) > MAX_METADATA:
        raise RequestError.at("metadata", f"{len(keys)} keys; send at most {MAX_METADATA}")
    for key in keys:
        if len(key) > MAX_METADATA_KEY_LEN:
            raise RequestError.at(
                "metadata", f"a key of {len(key)} characters; send at most {MAX_METADATA_KEY_LEN}"
            )
        encodable(key, "metadata")
        metadata.string(key, "", max_len=MAX_METADATA_VALUE_LEN)
    segment = metadata.string("segment", "", max_len=MAX_METADATA_VALUE_LEN)
    return metadata.string("task", "", max_len=64), segment


def _speculation(fields: Fields | None, limits: Limits) -> SpeculationOptions:
    """Our extension `speculation`, with the fields that `api.table` lists."""
    if fields is None:
        return SpeculationOptions(latency_class=limits.default_class or None)
    drafters = fields.strings("drafters", 64)
    if drafters is not None:
        drafters = tuple(dict.fromkeys(drafters))
    for name in drafters or ():
        if name not in limits.drafters:
            known = ", ".join(limits.drafters) or "none"
            raise fields.wrong("drafters", f"{shown(name)} is not a drafter; known: {known}")
    return SpeculationOptions(
        enabled=fields.boolean("enabled", default=True),
        max_draft_tokens=fields.integer("max_draft_tokens", None, 0, limits.max_draft_tokens),
        drafters=drafters,
        latency_class=_latency_class(fields, limits),
        law=_law(fields, limits),
        min_tokens_per_s=None if fields.get("min_tokens_per_s") is None
        else fields.number("min_tokens_per_s", 0.0, 0.0, MAX_TOKENS_PER_S),
    )  # fmt: skip


def _law(fields: Fields, limits: Limits) -> Law | None:
    name = fields.string("law", "", max_len=64)
    for law in limits.laws:
        if law == name:
            return law
    if name:
        allowed = ", ".join(limits.laws)
        raise fields.wrong(
            "law",
            f"{shown(name)} is not open to requests; allowed: {allowed} (coordinator.laws)",
        )
    return None


def _latency_class(fields: Fields, limits: Limits) -> str | None:
    name = fields.string("latency_class", "", max_len=64) or limits.default_class
    if name and name not in limits.latency_classes:
        allowed = ", ".join(limits.latency_classes) or "none"
        if name in limits.withheld_classes:
            raise ForbiddenError.at(
                fields.name("latency_class"),
                f"the key {limits.owner} may not use {name}; it may use: {allowed}",
            )
        raise fields.wrong(
            "latency_class",
            f"{shown(name)} is not open to requests; allowed: {allowed} "
            "(ingress.public_latency_classes)",
        )
    return name or None
