"""The request of a gRPC call, by the same rules as the bodies of HTTP."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import ConfigDict

from cluster.core import TokenArray
from cluster.errors import RequestError
from cluster.requests.fields import GrammarSpec
from cluster.rpc.generation import ChatMessage, GenerationRequest, ResumedChoice
from cluster.text.json_text import parse_json
from deployments.ingress.api.contract import REQUIRED, Body, supported
from deployments.ingress.chat import OF_MESSAGES, Turns
from deployments.ingress.fields import Names, shown
from deployments.ingress.openai_request import check_range
from deployments.ingress.sampling import Alternatives, Sampling
from deployments.ingress.spec import GenerationSpec, Limits, Prompt
from deployments.ingress.structured import KINDS, StructuredOutputs

_MAX_NAME_LEN = 128
_GRAMMAR = "sampling.grammar.source"
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "prompt_logprobs",
    "max_tokens",
    "logprobs",
    "logit_bias",
    "stop",
    "stop_token_ids",
)
# What GenerateRequest calls its fields.
_NAMES = {
    **{name: name for name in ("model", "n", "metadata", "cache_salt", "speculation")},
    **{name: f"sampling.{name}" for name in _SAME},
    "include_stop_str_in_output": "sampling.include_stop",
    **{name: f"speculation.{name}" for name in ("return_draft_sources", "return_draft_trees")},
    "use_beam_search": "sampling.beam_search",
    "length_penalty": "sampling.beam_search.length_penalty",
    "early_stopping": "sampling.beam_search.early_stopping",
}


class GenerateFields(Sampling):
    """A GenerateRequest without its prompt, by the paths of its fields."""

    model_config = ConfigDict(alias_generator=lambda name: _NAMES.get(name, name))
    hidden = Sampling.all_but(*_NAMES)

    logprobs: Alternatives | None = supported("log-probabilities")


class _Chat(Body):
    messages: Turns = supported(OF_MESSAGES, REQUIRED, alias="chat.messages")


def request_name(request: GenerationRequest) -> str:
    """The client's request id, or a random one; raises RequestError for an invalid id.

    Every response contains it.  Only the client uses it; it need not be unique.
    """
    name = request.request_id
    if len(name) > _MAX_NAME_LEN or not name.isprintable():
        what = f"{len(name)} characters" if len(name) > _MAX_NAME_LEN else "a control character"
        remedy = f"send at most {_MAX_NAME_LEN} printable characters or none"
        raise RequestError.at("request_id", f"{what}; {remedy}")
    return name or f"gen-{uuid.uuid4().hex}"


def to_spec(request: GenerationRequest, limits: Limits) -> GenerationSpec:
    """Validate `request`; raises RequestError or NotFoundError with field, value and remedy."""
    values = {path: _value(request, path) for path in _NAMES.values()}
    search = request.sampling.beam_search
    call = GenerateFields.read({**values, "sampling.beam_search": search is not None}, limits)
    prompt = prompt_of(request.prompt, limits)
    prompt = dataclasses.replace(prompt, names=Names({**call.names().own, **prompt.names.own}))
    _check_resume(request.resume, call.n, limits)
    width = call.n
    if search is not None:
        width = search.num_beams or call.n
        if request.resume:
            reason = "a beam search has nothing to resume; send the request without it"
            raise RequestError.at("resume", reason)
        most = limits.config.ingress.max_choices
        if not call.n <= width <= most:
            remedy = f"send n={call.n} to {most}"
            raise RequestError.at("sampling.beam_search.num_beams", f"{width}; {remedy}")
    call._expected = request.prediction
    spec = call.generation(limits, (prompt,), call.logprobs, num_samples=width)
    grammar = request.sampling.grammar
    if grammar is not None:
        params = dataclasses.replace(spec.params, grammar=_grammar(grammar, limits))
        spec = dataclasses.replace(spec, params=params, grammar_field=_GRAMMAR)
    return spec


def _value(request: Any, path: str) -> Any:
    """What is at a path of the message, as JSON has it; None for nothing."""
    for part in path.split("."):
        request = None if request is None else getattr(request, part)
    if path == "speculation":
        options = dataclasses.asdict(request)
        del options["return_draft_sources"], options["return_draft_trees"]  # of all of the answer
        names = options["drafters"]
        return {**options, "drafters": None if names is None else list(names)}
    if isinstance(request, tuple):
        return list(request)
    if isinstance(request, Mapping):
        return {str(key): value for key, value in request.items()}
    return None if request == "" else request


def _grammar(grammar: GrammarSpec, limits: Limits) -> GrammarSpec:
    """The request's grammar, checked as those of HTTP are."""
    kind = "json" if grammar.kind == "json_schema" else grammar.kind
    if kind not in KINDS:
        remedy = "send json_schema, regex, choice, grammar or structural_tag"
        raise RequestError.at("sampling.grammar.kind", f"{shown(grammar.kind)}; {remedy}")
    source = parse_json(grammar.source, _GRAMMAR) if kind == "choice" else grammar.source
    with Names({kind: _GRAMMAR}).told():
        found = StructuredOutputs.read({kind: source}, limits).held("")
    if found is None:
        raise RequestError.at(_GRAMMAR, "null; send a list of texts")
    return found[0]


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
    """The prompt of a request, with what the message calls it; raises RequestError for none."""
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError.at("text", "empty; send at least one character")
        return Prompt(text=prompt, names=Names({"prompt": "text"}))
    if isinstance(prompt, np.ndarray):
        if len(prompt) == 0:
            raise RequestError.at("tokens", "empty; send at least one token")
        check_ids(prompt, "tokens", limits)
        return Prompt(token_ids=prompt, names=Names({"prompt": "tokens"}))
    chat = _Chat.read({"chat.messages": list(map(dataclasses.asdict, prompt))}, limits)
    messages = tuple(turn.message() for turn in chat.messages)
    return Prompt(messages=messages, names=chat.names("chat.messages"))
