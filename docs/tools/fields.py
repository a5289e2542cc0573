"""The fields of bodies that have rows of their own in the tables of the documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deployments.ingress.api.contract import Body
from deployments.ingress.api.messages import ToolChoice
from deployments.ingress.nested import NamedSchema, ResponseFormat
from deployments.ingress.tools import Function, Tool
from deployments.ingress.wording import Rule

# Each is told in the row of the field that holds it.
_FOLDED = (Function, NamedSchema, ResponseFormat, Tool, ToolChoice)


def rules_of(body: type[Body], prefix: str = "") -> Iterator[Rule]:
    """Yield every field, by its path; `[]` stands for every element of a list."""
    for rule in body.rules().values():
        yield replace(rule, name=prefix + rule.name)
        if rule.below is not None and not issubclass(rule.below, _FOLDED):
            each = "" if rule.schema.get("type") == "object" else "[]"
            yield from rules_of(rule.below, f"{prefix}{rule.name}{each}.")
