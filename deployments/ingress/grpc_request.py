"""The request of a gRPC call, read from its message by the same rules as the bodies of HTTP."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic import ConfigDict

from cluster.client.generated import generation_pb2 as pb
from cluster.core import TokenArray
from cluster.errors import ProtocolError, RequestError
from cluster.requests.fields import REMOVED_LAWS
from cluster.rpc.codec import EARLY_STOPPING, LAW
from cluster.rpc.codec_records import TOKENS
from cluster.text.json_text import parse_json
from cluster.text.prompt import Held, Prompt
from deployments.ingress.api.contract import REQUIRED, Body, supported
from deployments.ingress.nested import KINDS, Speculation, StructuredOutputs
from deployments.ingress.openai_request import OF_MESSAGES, Scored, Turns
from deployments.ingress.spec import GenerationSpec, Limits, Resumed
from deployments.ingress.wording import Names, shown

_MAX_NAME_LEN = 128
_GRAMMAR = "sampling.grammar.source"
# Where a GenerateRequest has the fields that it calls as bodies do.
_PLACES: Mapping[str, Any] = {
    "": pb.GenerateRequest,
    "sampling.": pb.SamplingOptions,
    "speculation.": pb.SpeculationRequest,
}
_NAMES = {
    **{
        name: place + name
        for place, kind in _PLACES.items()
        for name in kind.DESCRIPTOR.fields_by_name
        if name in Scored.model_fields
    },
    "include_stop_str_in_output": "sampling.include_stop",
    "use_beam_search": "sampling.beam_search",
    "length_penalty": "sampling.beam_search.length_penalty",
    "early_stopping": "sampling.beam_search.early_stopping",
}
_ENUMS = {codec.wire: codec for codec in (EARLY_STOPPING, LAW)}
# An AcceptanceLaw that is gone, and the number of a field that is gone from SpeculationRequest.
_BLOCK = 3
_MIN_TOKENS_PER_S = 6


class GenerateFields(Scored):
    """A GenerateRequest without its prompt, by the paths of its fields."""

    model_config = ConfigDict(alias_generator=lambda name: _NAMES.get(name, name))
    hidden = Scored.all_but(*_NAMES)

    _grammar: Held | None = None

    def form(self) -> Held | None:
        return self._grammar


class _Chat(Body):
    messages: Turns = supported(OF_MESSAGES, REQUIRED, alias="chat.messages")


def request_name(name: str) -> str:
    """The client's request id, or a random one; raises RequestError for an invalid id.

    Every response contains it.  Only the client uses it; it need not be unique.
    """
    if len(name) > _MAX_NAME_LEN or not name.isprintable():
        what = f"{len(name)} characters" if len(name) > _MAX_NAME_LEN else "a control character"
        remedy = f"send at most {_MAX_NAME_LEN} printable characters or none"
        raise RequestError.at("request_id", f"{what}; {remedy}")
    return name or f"gen-{uuid.uuid4().hex}"


def to_spec(message: pb.GenerateRequest, limits: Limits) -> GenerationSpec:
    """Validate a request; raises RequestError or NotFoundError with field, value and remedy."""
    _check_removed(message)
    sampling = message.sampling
    is_search = sampling.HasField("beam_search")
    values = {path: _value(message, path) for path in _NAMES.values()}
    call = GenerateFields.read({**values, "sampling.beam_search": is_search}, limits)
    prompt = prompt_of(message, limits)
    resumed = _resumed(message, call.n, limits)
    width = call.n
    if is_search:
        width = sampling.beam_search.num_beams or call.n
        if resumed:
            raise RequestError.at(
                "resume", "a beam search has nothing to resume; send the request without it"
            )
        most = limits.config.ingress.max_choices
        if not call.n <= width <= most:
            remedy = f"send n={call.n} to {most}"
            raise RequestError.at("sampling.beam_search.num_beams", f"{width}; {remedy}")
    call._expected = message.prediction
    if sampling.HasField("grammar"):
        call._grammar = _grammar(sampling.grammar.kind, sampling.grammar.source, limits)
    spec = call.generation((prompt,), width)
    return dataclasses.replace(spec, resumed=resumed)


def _check_removed(message: pb.GenerateRequest) -> None:
    """Raise RequestError for what older versions served."""
    for field in cast(Any, UnknownFieldSet(message.speculation)):
        if field.field_number == _MIN_TOKENS_PER_S:
            raise RequestError.at(
                "speculation.min_tokens_per_s", "remove it; use speculation.latency_class"
            )
    if message.speculation.law == _BLOCK:
        raise RequestError.at("speculation.law", f"block is gone; {REMOVED_LAWS['block']}")


def _value(message: Any, path: str) -> Any:
    """What a message has at a path, as JSON has it; None for what is absent.

    Raises RequestError for an enum's number that this version does not know."""
    *above, name = path.split(".")
    for part in above:
        message = getattr(message, part)  # one that is absent reads as an empty one
    value, wire = getattr(message, name), message.DESCRIPTOR.fields_by_name[name]
    if not (message.HasField(name) if wire.has_presence else value):
        return None
    if wire.enum_type is not None:
        try:
            return _ENUMS[wire.enum_type.full_name].decode(value)
        except ProtocolError as error:
            raise RequestError.at(path, error.message) from None
    if name == "speculation":
        return {each: _value(message, f"{path}.{each}") for each in Speculation.model_fields}
    if name == "drafters":
        return list(value.names)
    if isinstance(value, Mapping):
        return {str(key): one for key, one in value.items()}
    return list(value) if wire.is_repeated else value


def _grammar(kind: str, source: str, limits: Limits) -> Held:
    """The request's grammar, checked as those of HTTP are."""
    kind = "json" if kind == "json_schema" else kind
    if kind not in KINDS:
        remedy = "send json_schema, regex, choice, grammar or structural_tag"
        raise RequestError.at("sampling.grammar.kind", f"{shown(kind)}; {remedy}")
    value = parse_json(source, _GRAMMAR) if kind == "choice" else source
    with Names({kind: _GRAMMAR}).told():
        found = StructuredOutputs.read({kind: value}, limits).held("")
    if found is None:
        raise RequestError.at(_GRAMMAR, "null; send a list of texts")
    return found[0], _GRAMMAR


def _resumed(
    message: pb.GenerateRequest, num_choices: int, limits: Limits
) -> Mapping[int, Resumed]:
    found: dict[int, Resumed] = {}
    for position, one in enumerate(message.resume):
        if one.index >= num_choices:
            raise RequestError.at("resume", f"choice {one.index} is not one of n={num_choices}")
        if one.index in found:
            raise RequestError.at("resume", f"choice {one.index} occurs twice; send it once")
        token_ids = _known(one.token_ids, f"resume[{position}].token_ids", limits)
        found[one.index] = Resumed(token_ids, one.finished)
    return found


def _known(sent: Sequence[int], name: str, limits: Limits) -> TokenArray:
    """The tokens of a field; raises RequestError for one outside the vocabulary."""
    token_ids = TOKENS.read(sent)
    if len(token_ids):
        limits.check_tokens(int(token_ids.min()), int(token_ids.max()), name)
    return token_ids


def tokens_of(sent: Sequence[int], name: str, limits: Limits) -> TokenArray:
    """The tokens of a field that has some; raises RequestError, naming it, for none, and for one
    outside the vocabulary."""
    if not sent:
        raise RequestError.at(name, "empty; send at least one token")
    return _known(sent, name, limits)


def prompt_of(message: Any, limits: Limits) -> Prompt:
    """The prompt of a GenerateRequest or a TokenizeRequest, with what the message calls it; raises
    RequestError for none."""
    kind = message.WhichOneof("prompt")
    place = "chat.messages" if kind == "chat" else kind
    names = {"messages": place, "prompt": place}
    if kind == "text":
        if not message.text:
            raise RequestError.at("text", "empty; send at least one character")
        return Prompt(text=message.text, names=names)
    if kind == "tokens":
        token_ids = tokens_of(message.tokens.token_ids, "tokens", limits)
        return Prompt(token_ids=token_ids, names=names)
    if kind is None:
        *kinds, last = (each.name for each in message.DESCRIPTOR.oneofs_by_name["prompt"].fields)
        raise RequestError.at("prompt", f"absent; set {', '.join(kinds)} or {last}")
    turns = [
        {"role": one.role, "content": one.content, "name": one.name}
        for one in message.chat.messages
    ]
    chat = _Chat.read({"chat.messages": turns}, limits)
    messages = tuple(told for turn in chat.messages for _, told in turn._messages)
    return Prompt(messages=messages, names=names)
