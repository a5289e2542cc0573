"""Which drafters a configuration may name, and what is said of those that it may not."""

import dataclasses
from typing import Any

import pytest

from cluster.config.schema import DrafterConfig, DrafterPlacement
from cluster.draft.base import DrafterContext
from cluster.draft.plugin import Draft, RequestState, TextDrafter
from cluster.draft.registry import KINDS, REMOVED, check, create, drafter_class
from cluster.errors import ConfigError
from cluster.spec.native import trees
from tests.support.errors import config_error

CONTEXT = DrafterContext("d", max_nodes=8, max_requests=4)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"width": 0}, "width: 0"),
        ({"engine": {"page_size": 0}}, "engine.page_size: 0"),
        ({"num_children": 40}, "num_children: 40"),
    ],
)
def test_a_value_that_the_options_refuse_gets_its_path(options: dict[str, object], key: str):
    with pytest.raises(ConfigError) as caught:
        check("lm", DrafterConfig(kind="lm", options=options))
    path = f"drafters.lm.options.{key}"
    assert caught.value.param == path.partition(":")[0]
    assert caught.value.message.startswith(path)


def test_an_unknown_kind_is_named_with_the_nearest_one():
    with pytest.raises(ConfigError) as caught:
        check("x", DrafterConfig(kind="ngram_cach"))
    assert caught.value.param == "drafters.x.kind"
    assert "did you mean ngram_cache?" in caught.value.message
    with config_error("missing; known kinds: lm, prompt_lookup, suffix"):
        check("x", DrafterConfig())


@pytest.mark.parametrize("kind", REMOVED)
def test_a_kind_that_is_gone_says_what_replaces_it(kind: str):
    with pytest.raises(ConfigError) as caught:
        check("x", DrafterConfig(kind=kind, options={"url": "http://a"}))
    assert caught.value.message == f"drafters.x.kind: this kind is gone; {REMOVED[kind]}"


# What has no default: which head it is, and which layers draft.
REQUIRED = {
    **{key: {"model": "h"} for key in ("eagle3", "peagle", "medusa", "block", "mtp")},
    "early_exit": {"exit_layer": 1},
    "layer_skip": {"skip_layers": [1]},
    "cascade": {"stages": ["suffix", "lm"]},
}


INSIDE = pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.is_inside])


@INSIDE
def test_outside_of_a_target_it_says_where_it_belongs(kind: str):
    placed = DrafterConfig(kind=kind, options=REQUIRED.get(kind, {}))
    options = check("x", dataclasses.replace(placed, placement=DrafterPlacement(with_="target")))
    with config_error(r"drafters\.x\.placement: .* \{with: target\}"):
        drafter_class(kind)(DrafterContext("x", 8, 8), options)


@INSIDE
def test_what_reads_the_targets_steps_has_no_process_of_its_own(kind: str):
    options = REQUIRED.get(kind, {})
    check(
        "x", DrafterConfig(kind=kind, placement=DrafterPlacement(with_="target"), options=options)
    )
    for own in ({"placement": DrafterPlacement()}, {"nice": 5}, {"replicas": 2}):
        with config_error(rf"drafters\.x\.\w+: .*kind: {kind}.*remove this"):
            check("x", DrafterConfig(kind=kind, options=options, **own))


@pytest.mark.parametrize(
    ("kind", "option", "remedy"),
    [
        ("ngram_cache", "max_contexts", "set max_tokens to half of it"),
        ("lookahead", "ngram", "drafts go on word by word after max_words of them, so remove it"),
    ],
)
def test_an_option_that_is_gone_is_refused_by_name(kind: str, option: str, remedy: str):
    with pytest.raises(ConfigError) as caught:
        check("x", DrafterConfig(kind=kind, options={option: 4}))
    assert caught.value.message == f"drafters.x.options.{option}: this key is gone; {remedy}"


@dataclasses.dataclass(frozen=True)
class SilentOptions:
    volume: int = 0


def test_a_drafter_without_native_code_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trees, "is_available", lambda: False)
    with config_error(r"drafts need native code: .*apt install g") as found:
        create("x", DrafterConfig(kind="suffix"), CONTEXT)
    assert found.value.param == "drafters.x.kind"


def test_an_external_drafter_is_named_by_module_and_class():
    created = create("x", config_of(WithOptions, volume=3), CONTEXT)
    assert isinstance(created, WithOptions)
    assert created.options == SilentOptions(3)
    with config_error(r"drafters.x.options.volum: .*did you mean volume\?"):
        check("x", config_of(WithOptions, volum=3))


@pytest.mark.parametrize("kind", ["no.such.module:Drafter", f"{__name__}:NoSuchDrafter"])
def test_an_external_drafter_that_cannot_be_loaded_is_a_config_error(
    kind: str,
):
    with config_error("cannot be loaded", "drafters.x.kind"):
        check("x", DrafterConfig(kind=kind))


# What `check` passes can be created and called: the signatures of a drafter of one's own.


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
    def draft(self, request: RequestState) -> Draft | None:
        return None


class ObservesNothing:
    """Of its other methods nobody knows the signatures."""

    propose = release = max

    def observe(self): ...


class Described(ObservesNothing):
    def __init__(self, context: DrafterContext, options: Any) -> None: ...


class ByInstance(Described):
    observe = max


def config_of(kind: type[Any], **options: Any) -> DrafterConfig:
    return DrafterConfig(kind=f"{__name__}:{kind.__name__}", options=options)


@pytest.mark.parametrize("kind", [OnlyDraft, WithOptions, Anything, ByInstance])
def test_what_check_passes_can_be_created(kind: type[Any]):
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
def test_check_refuses_what_could_not_be_created_or_called(kind: type[Any], reason: str):
    with config_error(reason, "drafters.mine.kind") as caught:
        check("mine", config_of(kind))
    assert "docs/own-drafter.md" in caught.value.message
