"""Objects within bodies: what an answer must be (`response_format`, `structured_outputs` and their
like, as grammars), and the say over its drafts, which is our extension `speculation`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from cluster.errors import ForbiddenError, RequestError, joined
from cluster.grammar.json_schema import lenient
from cluster.requests.fields import REMOVED_LAWS, GrammarSpec
from cluster.text.json_text import parse_json
from cluster.text.prompt import Held
from deployments.ingress.api.contract import REQUIRED, Body, Read, supported, up_to
from deployments.ingress.spec import Limits
from deployments.ingress.wording import TEXT, JsonObject, json_kind, shown

_MAX_CHOICES, _MAX_CHOICE_LEN = 4096, 65536
KINDS = ("json", "regex", "choice", "grammar", "structural_tag")
_ANY_OBJECT = GrammarSpec("json_schema", '{"type": "object"}')
_ObjectOrText = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, TEXT]})]
_Text = Annotated[str, Field(min_length=1)]
_Texts = Annotated[
    list[Annotated[str, Field(max_length=_MAX_CHOICE_LEN)]],
    Field(min_length=1, max_length=_MAX_CHOICES),
]


def _held_to(kind: str, value: Any, path: str) -> Held:
    """What holds an answer by one of vLLM's kinds, from a value that its field of
    `StructuredOutputs` may have; raises RequestError, naming `path`, for no schema or tag."""
    if kind == "json_object":
        return _ANY_OBJECT, path
    if kind in ("json", "structural_tag"):
        # vLLM takes schemas as objects, and as texts of them.
        value = parse_json(value, path) if isinstance(value, str) else value
        if not isinstance(value, dict):
            raise RequestError.at(path, f"{json_kind(value)}; send a JSON schema or tag")
        return GrammarSpec("json_schema" if kind == "json" else kind, _dumped(value)), path
    if kind == "choice":
        value = _dumped(list(dict.fromkeys(value)))
    return GrammarSpec(kind, value), path


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


class StructuredOutputs(Body):
    json_: _ObjectOrText = supported("a JSON schema", alias="json")
    json_object: bool = supported("any JSON object", False)
    regex: _Text | None = supported("a regular expression for the whole answer")
    choice: _Texts | None = supported("one of these texts")
    grammar: _Text | None = supported("a grammar in Lark, or in GBNF")
    structural_tag: _ObjectOrText = supported("as in response_format")

    def held(self, path: str) -> Held | None:
        """What holds the answer.  path: of this."""
        asked = {self.called(name): getattr(self, name) for name in sorted(self.model_fields_set)}
        if not self.json_object:
            asked.pop("json_object", None)
        if len(asked) > 1:
            raise RequestError.at(path, f"{' and '.join(asked)} are set; send one of them")
        for kind, value in asked.items():
            return _held_to(kind, value, joined(path, kind))
        return None


class NamedSchema(Body):
    name: str | None = supported("of the schema", max_length=64)
    description: str | None = supported("of the schema", max_length=65536)
    schema_: JsonObject = supported("a JSON schema", REQUIRED, alias="schema")
    # The schema holds either way: an answer that is not asked to be strict may be so too.
    strict: bool = supported(
        "the schema holds either way; true = what is not served of it is refused", False
    )

    def served(self) -> Any:
        """The schema that the answer obeys: of one that is not strict, all that is served."""
        return lenient(self.schema_) if self.schema_ and not self.strict else self.schema_


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"] = supported(
        "text, json_object, json_schema or structural_tag", REQUIRED
    )
    json_schema: NamedSchema | None = supported("a name and a schema")
    format: Any = supported("of a structural_tag")
    structures: Any = supported("of a structural_tag")
    triggers: Any = supported("of a structural_tag")

    def held(self, path: str) -> Held | None:
        """What holds the answer.  path: of this."""
        if self.type == "json_schema":
            below, schema = self.schema_of()
            place = joined(path, below)
            if schema is None:
                raise RequestError.at(place, "missing; send a JSON schema")
            return _held_to("json", schema, place)
        if self.type == "structural_tag":
            tag = self.model_dump(exclude_unset=True, by_alias=True)
            return _held_to("structural_tag", tag, path)
        return _held_to("json_object", True, path) if self.type == "json_object" else None

    def schema_of(self) -> tuple[str, Any]:
        """Where the schema stands, and the schema as it is held."""
        inner = self.json_schema
        return ("json_schema", None) if inner is None else ("json_schema.schema", inner.served())


class FlatFormat(NamedSchema, ResponseFormat):
    """Of Responses and Messages: the schema stands beside its type."""

    hidden = frozenset({"json_schema"})
    schema_: JsonObject | None = supported("a JSON schema", alias="schema")  # type: ignore[assignment]

    def schema_of(self) -> tuple[str, Any]:
        return "schema", self.served()


# A request's say over drafting: our extension `speculation`.


def _open(name: str, allowed: Sequence[str], setting: str) -> str:
    if name not in allowed:
        known = ", ".join(allowed) or "none"
        raise RequestError(f"{shown(name)} is not open to requests; allowed: {known} ({setting})")
    return name


def _latency_class(name: str, limits: Limits) -> str:
    allowed, owner = limits.latency_classes, limits.caller.name
    if owner and name in limits.config.coordinator.latency_classes and name not in allowed:
        known = ", ".join(allowed) or "none"
        raise ForbiddenError(f"the key {owner} may not use {name}; it may use: {known}")
    return name and _open(name, allowed, "ingress.public_latency_classes")


def _law(name: str, limits: Limits) -> str:
    if name in REMOVED_LAWS:
        raise RequestError(f"{name} is gone; {REMOVED_LAWS[name]}")
    return name and _open(name, limits.config.coordinator.laws, "coordinator.laws")


Drafter = Annotated[
    str,
    Field(max_length=256),
    Read(lambda name, limits: _open(name, limits.config.on_their_own, "drafters")),
]


# fmt: off
class Speculation(Body):
    enabled: bool = supported("false = plain decoding", True)
    max_draft_tokens: (
        Annotated[int, Field(ge=0), up_to("config.coordinator.max_draft_tokens")] | None
    ) = supported("draft tokens checked per step, at most")
    drafters: list[Drafter] | None = supported("names of those that may help", max_length=64)
    latency_class: Annotated[str, Field(max_length=64), Read(_latency_class)] | None = supported(
        "one of ingress.public_latency_classes")
    law: Annotated[str, Field(max_length=64), Read(_law)] | None = supported(
        "how drafts are accepted, one of coordinator.laws; under all but coupled the text depends "
        "on the drafts")
    # fmt: on
