"""Converts a GenerateRequest to a GenerationSpec, by the same rules as OpenAI's bodies."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.core import TokenArray
from cluster.errors import RequestError
from cluster.requests.grammar_spec import GrammarSpec
from cluster.rpc.generation import ChatMessage, GenerationRequest, ResumedChoice
from cluster.text.json_text import parse_json
from deployments.ingress.beams import read_beams, with_beams
from deployments.ingress.chat import parse_messages
from deployments.ingress.fields import Fields, shown
from deployments.ingress.names import Names
from deployments.ingress.openai_request import check_model, check_range
from deployments.ingress.predicted import with_prediction
from deployments.ingress.prompt_logprobs import read_max_tokens, read_prompt_logprobs
from deployments.ingress.sampling import read_spec
from deployments.ingress.spec import GenerationSpec, Limits, Prompt
from deployments.ingress.structured import KINDS, grammar_of

_MAX_NAME_LEN = 128
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "min_tokens", "ignore_eos", "prompt_logprobs",
)  # fmt: skip
_GRAMMAR = "sampling.grammar.source"
# What GenerateRequest calls the fields of a completion.
_NAMES = {
    **{
        name: f"sampling.{name}"
        for name in (*_SAME, "max_tokens", "logprobs", "logit_bias", "stop", "stop_token_ids")
    },
    **{f"structured_outputs.{kind}": _GRAMMAR for kind in KINDS},
    "return_draft_trees": "speculation.return_draft_trees",
    **{name: f"sampling.beam_search.{name}" for name in ("length_penalty", "early_stopping")},
}


def names_of(prompt: str | Sequence[ChatMessage] | TokenArray) -> Names:
    """What a message calls its prompt."""
    if isinstance(prompt, str):
        return Names({"prompt": "text"})
    if isinstance(prompt, np.ndarray):
        return Names({"prompt": "tokens"})
    return Names({"prompt": "chat.messages", "messages": "chat.messages"})


def request_name(request: GenerationRequest) -> str:
    """The client's request id, or a random one; raises RequestError for an invalid id.

    Every response contains it.  Only the client uses it; it need not be unique.
    """
    name = request.request_id
    if len(name) > _MAX_NAME_LEN or not name.isprintable():
        what = f"{len(name)} characters" if len(name) > _MAX_NAME_LEN else "a control character"
        raise RequestError.at(
            "request_id", f"{what}; send at most {_MAX_NAME_LEN} printable characters or none"
        )
    return name or f"gen-{uuid.uuid4().hex}"


def to_spec(request: GenerationRequest, limits: Limits) -> GenerationSpec:
    """Validate `request`; raises RequestError or NotFoundError with field, value and remedy."""
    names = Names({**names_of(request.prompt).own, **_NAMES})
    with names.told():
        return _spec(request, limits, names)


def _spec(request: GenerationRequest, limits: Limits, names: Names) -> GenerationSpec:
    check_model(request.model, limits)
    sampling = request.sampling
    values: dict[str, Any] = {name: getattr(sampling, name) for name in _SAME}
    values |= {
        "model": request.model,
        "n": request.n,
        "max_tokens": sampling.max_tokens,
        "logprobs": sampling.logprobs,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "metadata": dict(request.metadata),
        "speculation": _speculation(request),
        "return_draft_sources": request.speculation.return_draft_sources,
        "return_draft_trees": request.speculation.return_draft_trees,
        "cache_salt": request.cache_salt or None,
    }
    fields = Fields(values)
    num_choices = fields.integer("n", 1, 1, limits.max_choices) or 1
    prompt_logprobs = read_prompt_logprobs(fields, limits)
    spec = read_spec(
        fields,
        limits,
        (dataclasses.replace(prompt_of(request.prompt, limits), names=names),),
        num_choices,
        read_max_tokens(fields, "max_tokens", is_prompt_wanted=prompt_logprobs is not None),
        fields.integer("logprobs", None, 0, limits.max_logprobs),
    )
    _check_resume(request.resume, num_choices, limits)
    spec = dataclasses.replace(
        with_prediction(spec, request.prediction, limits),
        params=dataclasses.replace(spec.params, grammar=_grammar(sampling.grammar)),
        grammar_field=_GRAMMAR if sampling.grammar is not None else "",
        include_stop=sampling.include_stop,
        prompt_logprobs=prompt_logprobs,
    )
    return _searched(request, spec, fields, limits)


def _searched(
    request: GenerationRequest, spec: GenerationSpec, fields: Fields, limits: Limits
) -> GenerationSpec:
    """`spec` as a beam search, where the request asks for one."""
    asked = request.sampling.beam_search
    if asked is None:
        return spec
    if request.resume:
        raise RequestError.at(
            "resume", "a beam search has nothing to resume; send the request without it"
        )
    width = asked.num_beams or spec.num_choices
    if not spec.num_choices <= width <= limits.max_choices:
        raise RequestError.at(
            "sampling.beam_search.num_beams",
            f"{width}; send n={spec.num_choices} to {limits.max_choices}",
        )
    own = {"length_penalty": asked.length_penalty, "early_stopping": asked.early_stopping}
    beams = read_beams(Fields({**fields.values(), **own, "use_beam_search": True}), width)
    return with_beams(spec, beams, spec.num_choices)


def _grammar(grammar: GrammarSpec | None) -> GrammarSpec | None:
    """The request's grammar, checked as those of HTTP are."""
    if grammar is None:
        return None
    kind = "json" if grammar.kind == "json_schema" else grammar.kind
    if kind not in ("json", "regex", "choice", "grammar", "structural_tag"):
        raise RequestError.at(
            "sampling.grammar.kind",
            f"{shown(grammar.kind)}; send json_schema, regex, choice, grammar or structural_tag",
        )
    source = parse_json(grammar.source, _GRAMMAR) if kind == "choice" else grammar.source
    return grammar_of(kind, source, _GRAMMAR)


def _check_resume(resume: Sequence[ResumedChoice], num_choices: int, limits: Limits) -> None:
    seen: set[int] = set()
    for position, one in enumerate(resume):
        if not 0 <= one.index < num_choices:
            raise RequestError.at("resume", f"choice {one.index} is not one of n={num_choices}")
        if one.index in seen:
            raise RequestError.at("resume", f"choice {one.index} occurs twice; send it once")
        seen.add(one.index)
        check_ids(one.token_ids, f"resume[{position}].token_ids", limits)


def check_ids(token_ids: TokenArray, name: str, limits: Limits) -> None:
    """Raise RequestError, naming the field, for a token outside the vocabulary."""
    if len(token_ids):
        check_range(int(token_ids.min()), int(token_ids.max()), name, limits)


def prompt_of(prompt: str | Sequence[ChatMessage] | TokenArray, limits: Limits) -> Prompt:
    """The prompt of a request; raises RequestError for an empty one."""
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError.at("text", "empty; send at least one character")
        return Prompt(text=prompt, names=names_of(prompt))
    if isinstance(prompt, np.ndarray):
        if len(prompt) == 0:
            raise RequestError.at("tokens", "empty; send at least one token")
        check_ids(prompt, "tokens", limits)
        return Prompt(token_ids=prompt, names=names_of(prompt))
    messages = [{"role": one.role, "content": one.content, "name": one.name} for one in prompt]
    names = names_of(prompt)
    with names.told():
        return Prompt(messages=parse_messages(messages), names=names)


def _speculation(request: GenerationRequest) -> dict[str, Any]:
    options = request.speculation
    names = None if options.drafters is None else list(options.drafters)
    return {
        "enabled": options.enabled,
        "max_draft_tokens": options.max_draft_tokens,
        "drafters": names,
        "latency_class": options.latency_class,
        "min_tokens_per_s": options.min_tokens_per_s,
        "law": options.law,
    }
