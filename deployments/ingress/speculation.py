"""A request's say over drafting: our extension `speculation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, cast

from pydantic import Field

from cluster.core import SpeculationOptions
from cluster.errors import ForbiddenError, RequestError
from cluster.requests.fields import REMOVED_LAWS, Law
from deployments.ingress.api.contract import Body, Read, supported, up_to
from deployments.ingress.spec import Limits
from deployments.ingress.wording import shown


def _open(name: str, allowed: Sequence[str], setting: str) -> str:
    if name not in allowed:
        known = ", ".join(allowed) or "none"
        reason = f"{shown(name)} is not open to requests; allowed: {known} ({setting})"
        raise RequestError.at("", reason)
    return name


def _latency_class(name: str, limits: Limits) -> str:
    allowed, owner = limits.latency_classes, limits.caller.name
    if owner and name in limits.config.coordinator.latency_classes and name not in allowed:
        known = ", ".join(allowed) or "none"
        reason = f"the key {owner} may not use {name}; it may use: {known}"
        raise ForbiddenError.at("", reason)
    return name and _open(name, allowed, "ingress.public_latency_classes")


def _law(name: str, limits: Limits) -> str:
    if name in REMOVED_LAWS:
        raise RequestError.at("", f"{name} is gone; {REMOVED_LAWS[name]}")
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


    def options(self, limits: Limits) -> SpeculationOptions:
        """As coordinators know it."""
        return SpeculationOptions(
            enabled=self.enabled,
            max_draft_tokens=self.max_draft_tokens,
            drafters=None if self.drafters is None else tuple(dict.fromkeys(self.drafters)),
            latency_class=self.latency_class or limits.caller.key.default_class or None,
            law=cast("Law | None", self.law or None),
        )
