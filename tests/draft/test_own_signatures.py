"""What `check` passes can be created and called: the signatures of a drafter of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cluster.config.schema import DrafterConfig
from cluster.core import DraftTask, Observation, Proposal
from cluster.draft.base import DrafterContext
from cluster.draft.plugin import Draft, RequestState, TextDrafter
from cluster.draft.registry import check, create
from cluster.errors import ConfigError
from tests.draft.test_registry import SilentOptions

CONTEXT = DrafterContext("d", max_nodes=8, max_requests=4)


class OnlyDraft(TextDrafter):
    """As short as the page allows."""

    def draft(self, request: RequestState, max_nodes: int) -> Draft | None:
        return None


class WithOptions(OnlyDraft):
    Options = SilentOptions


class NoOptionsTaken(OnlyDraft):
    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)


class OnlyByName(OnlyDraft):
    def __init__(self, *, context: DrafterContext, options: Any) -> None:
        raise AssertionError("never called")


class Anything(OnlyDraft):
    def __init__(self, *given: Any) -> None:
        super().__init__(given[0])


class NoDraft(TextDrafter):
    """Has all methods of the protocol, and none that drafts."""


class DraftsWithoutBound(TextDrafter):
    def draft(self, request: RequestState) -> Draft | None:  # type: ignore[override]
        return None


class ObservesNothing:
    def observe(self) -> Sequence[Observation]:
        return []

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        return []

    def release(self, request_ids: Sequence[str]) -> None: ...


class Described(ObservesNothing):
    def __init__(self, context: DrafterContext, options: Any) -> None: ...


class ByInstance:
    """Its methods are functions whose signatures nobody knows."""

    def __init__(self, context: DrafterContext, options: Any) -> None: ...

    observe = propose = release = max


def config_of(kind: type[Any], **options: Any) -> DrafterConfig:
    return DrafterConfig(kind=f"{__name__}:{kind.__name__}", options=options)


@pytest.mark.parametrize("kind", [OnlyDraft, WithOptions, Anything, ByInstance])
def test_what_check_passes_can_be_created(kind: type[Any]) -> None:
    check("mine", config_of(kind))
    assert isinstance(create("mine", config_of(kind), CONTEXT), kind)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            NoOptionsTaken,
            r"its constructor takes \(context\), and is called with "
            r"\(context, options\)",
        ),
        (OnlyByName, r"its constructor takes \(\*, context"),
        (NoDraft, "it has no method draft"),
        (DraftsWithoutBound, r"its method draft takes .*called with \(self, request, max_nodes\)"),
        (ObservesNothing, r"its constructor takes \(\)"),
        (Described, r"its method observe takes \(self\)"),
    ],
)
def test_check_refuses_what_could_not_be_created_or_called(kind: type[Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        check("mine", config_of(kind))
    assert caught.value.param == "drafters.mine.kind"
    assert "docs/own-drafter.md" in caught.value.message
