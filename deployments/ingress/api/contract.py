"""Bodies of requests as models: what each field may be, and whether it is supported here.

The parsers, docs/api.md and /openapi.json all read these models; `wording` says what is wrong.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from cluster.errors import RequestError, did_you_mean
from cluster.records import record
from deployments.ingress.spec import Limits
from deployments.ingress.wording import (
    MAX_SHOWN_KEY_LEN,
    JsonObject,
    Rule,
    Schema,
    Status,
    plain,
    refusal,
    shown,
    told_names,
    unserved,
)

REQUIRED: Any = ...


class Body(BaseModel):
    """An object in a request, or all of it.  A field that is null is absent.

    hidden: fields of the bases that this body does not have.  kinds: the values of `type` that are
    served, where others are told before what stands beside them.  is_listed: it stands in a list,
    or in an object there; a lenient server leaves out one of a kind that is not served.
    path, summary: of the POST endpoint whose body it is.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    hidden: ClassVar[frozenset[str]] = frozenset()
    kinds: ClassVar[frozenset[str]] = frozenset()
    is_listed: ClassVar[bool] = False
    path: ClassVar[str]
    summary: ClassVar[str]
    # What it may ask for, how it was sent, the names of fields without effect, and whether it is
    # taken as not sent.
    _limits: Limits = PrivateAttr()
    _given: JsonObject = {}
    _ignored: tuple[str, ...] = ()
    _is_left_out: bool = False

    @classmethod
    def read(cls, values: JsonObject, limits: Limits) -> Self:
        """Read a body; raises RequestError with the field, the value and the remedy."""
        try:
            body = cls.model_validate(values, context=limits)
        except ValidationError as error:
            # Without its cause, which would show the values in a log.
            raise error.errors()[0]["ctx"]["error"] from None
        body._given, body._ignored = values, told_names(body._without_effect(), limits.logged)
        return body

    @classmethod
    @cache
    def rules(cls) -> Mapping[str, Rule]:
        """Its fields by their names in the body: first what is required, then the class's own."""
        schemas = cls.model_json_schema()["properties"]
        found: dict[str, Rule] = {}
        for base in cls.__mro__:
            for attribute in filter(cls.model_fields.get, inspect.get_annotations(base)):
                declared, name = cls.model_fields[attribute], cls.called(attribute)
                rule = Rule(
                    name,
                    declared.description or "",
                    plain(schemas[name]),
                    declared.is_required(),
                    below=_body_in(declared.annotation),
                )
                found.setdefault(attribute, rule)
            for rule in unserved(base):
                found.setdefault(rule.name, rule)
        rules = [rule for attribute, rule in found.items() if attribute not in cls.hidden]
        rules.sort(key=lambda rule: not rule.is_required)
        return {rule.name: rule for rule in rules}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of fields that had no effect."""
        return self._ignored

    @classmethod
    def all_but(cls, *names: str) -> frozenset[str]:
        """Its fields without these."""
        return frozenset(cls.rules()) - {*names}

    @classmethod
    def called(cls, attribute: str) -> str:
        """What the body calls a field."""
        return cls.model_fields[attribute].alias or attribute

    def wrong(self, attribute: str, reason: str) -> RequestError:
        """The error of a field."""
        return RequestError.at(self.called(attribute), reason)

    def ignore(self, name: str, reason: str) -> None:
        """Take a field of the whole body as not sent; a strict server raises RequestError."""
        if not self._limits.is_lenient:
            raise RequestError.at(name, reason)
        self._ignored += (name,)

    @classmethod
    def leaves_out(cls, values: JsonObject) -> bool:
        """True if a lenient server takes this element of a list as not sent."""
        kind = values.get("type")
        return cls.is_listed and bool(cls.kinds) and isinstance(kind, str) and kind not in cls.kinds

    def check(self) -> None:
        """Raise RequestError, naming a field below this object, for fields at odds."""

    @model_validator(mode="wrap")  # type: ignore[arg-type]  # mypy infers no model from Self
    @classmethod
    def _read(
        cls, values: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo[Limits]
    ) -> Self:
        if not isinstance(values, dict):
            return handler(values)  # which says what is wrong
        with _placed():
            if cls.leaves_out(values) and info.context.is_lenient:
                body = cls.model_construct()  # the others keep their numbers, for errors
                body._is_left_out, body._ignored = True, (values["type"][:MAX_SHOWN_KEY_LEN],)
                return body
            kept, ignored = cls._kept(values, info.context)
            try:
                body = handler(kept)
            except ValidationError as error:
                raise refusal(cls, error, info.context) from None
            body._limits, body._ignored = info.context, tuple(ignored)
            body.check()
        return body

    @classmethod
    def _kept(cls, values: JsonObject, limits: Limits) -> tuple[JsonObject, list[str]]:
        """What is read of an object as it was sent, and the names of fields without effect; raises
        RequestError for the first name that is not accepted."""
        rules, kept, ignored = cls.rules(), JsonObject(), list[str]()
        for key, value in values.items():
            rule, name = rules.get(key), key[:MAX_SHOWN_KEY_LEN]
            if rule is None:
                # Clients send an answer back with its empty fields (`annotations: []`).
                if cls.is_listed and value in (None, [], {}):
                    continue
                if not limits.is_lenient:
                    raise RequestError.at(
                        name, f"unknown field; {did_you_mean(name, rules) or 'remove it'}"
                    )
                ignored.append(name)
            elif rule.status is Status.SUPPORTED:
                # A kind that is not served is told before what stands beside it.
                if cls.kinds and key == "type" and value not in (None, *cls.kinds):
                    served = " or ".join(sorted(cls.kinds))
                    raise RequestError.at(name, f"{shown(value)} is not served; send {served}")
                if isinstance(value, dict) and "additionalProperties" in rule.schema:
                    value = {below: one for below, one in value.items() if one is not None}
                if value is not None:
                    kept[key] = value
            elif not rule.asks_for_nothing(value):
                if not rule.has_no_effect(is_lenient=limits.is_lenient):
                    raise RequestError.at(name, f"{shown(value)} is not supported; {rule.note}")
                ignored.append(name)
        return kept, ignored

    def _without_effect(self) -> Iterator[str]:
        """The paths of all fields without effect; `[]` stands for every element of a list."""
        yield from self._ignored
        for attribute, value in self:
            is_list = isinstance(value, list)
            for each in value if is_list else (value,):
                if isinstance(each, Body):
                    place = self.called(attribute) + ("[]" if is_list else "")
                    yield from (f"{place}.{name}" for name in each._without_effect())


def _body_in(annotation: Any) -> type[Body] | None:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return annotation
    return next(filter(None, map(_body_in, get_args(annotation))), None)


@contextlib.contextmanager
def _placed() -> Iterator[None]:
    """RequestErrors that are raised inside name a place below the value that is validated."""
    try:
        yield
    except RequestError as error:
        raise PydanticCustomError("placed", "{error}", {"error": error}) from None


@record
class Read:
    """Reads a value before, after or instead of the field's type.

    read: from the value and the limits; raises RequestError, with a path where that is below the
    field.
    schema: of the value, from that of the field's type.
    """

    read: Callable[[Any, Limits], Any]
    schema: Callable[[Schema], Schema] = dict
    when: Literal["before", "after", "plain"] = "after"

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        make = getattr(core_schema, f"with_info_{self.when}_validator_function")
        return make(self._run, *(() if self.when == "plain" else (handler(source),)))

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> Schema:
        return self.schema({} if self.when == "plain" else handler(core))

    def _run(self, value: Any, info: ValidationInfo[Limits]) -> Any:
        with _placed():
            return self.read(value, info.context)


def up_to(limit: str) -> Read:
    """The greatest value, or the most items, by its path in `Limits`."""

    def read(value: Any, limits: Limits) -> Any:
        most, is_list = attrgetter(limit)(limits), isinstance(value, list)
        if (len(value) if is_list else value) > most:
            what = f"{len(value)} items" if is_list else f"{shown(value)} is out of range"
            raise RequestError(f"{what}; send at most {most}")
        return value

    def schema(of: Schema) -> Schema:
        return {**of, "maxItems" if of["type"] == "array" else "maximum": limit}

    return Read(read, schema)


def or_text(text: Schema, listed: Callable[[str], list[Any]]) -> Read:
    """A text that stands for a list.  text: its schema.  listed: makes the list of it."""

    def read(value: Any, limits: Limits) -> Any:
        if value == "":
            raise RequestError("empty; send at least one character")
        return listed(value) if isinstance(value, str) else value

    return Read(read, lambda of: {"anyOf": [text, of]}, "before")


def instead(read: Callable[[Any, Limits], Any], schema: Schema) -> Read:
    """Reads what pydantic has no type for."""
    return Read(read, lambda _: schema, "plain")


def supported(note: str, default: Any = None, **more: Any) -> Any:
    """A field that does what `note` says.  more: as of pydantic's `Field`."""
    return Field(default, description=note, **more)
