"""What several keys must obey together: above all those of drafters, tasks, cascades, rollouts."""

from __future__ import annotations

import re

from cluster.config.parse import check_known, check_that
from cluster.config.processes import CASCADE, RECORDER, DrafterConfig, DrafterPlacement
from cluster.config.schema import OTHER_SEGMENT, Config

# All of them lie in memory beside the model.
_MAX_ADAPTERS = 64
# Adapters are asked for by name, as models are.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
# Metrics have a series for each of them and each task.
_MAX_SEGMENTS = 32


def check(config: Config) -> None:
    """Raise ConfigError for the first reference between keys that does not hold."""
    _check_target(config)
    check_that(
        not config.target.engine.reproducible or set(config.coordinator.laws) == {"coupled"},
        "coordinator.laws",
        "only coupled goes with target.engine.reproducible: under the others a text depends on "
        "drafts, which nobody repeats",
    )
    for name in config.residents:
        config.drafters[name].check_resident(f"drafters.{name}")
    for name in config.elsewhere:
        _check_elsewhere(name, config.drafters[name])
    check_drafters(config)
    classes = config.coordinator.latency_classes
    for place, rule in enumerate(config.coordinator.draft_length.overrides):
        for key, name, known in (
            ("class", rule.class_, classes),
            ("task", rule.task, (*config.tasks, "default")),
        ):
            if name:
                path = f"coordinator.draft_length.overrides[{place}].{key}"
                check_known(name, known, path, f"{name!r} is no {key}", "known")
    for name in config.public_latency_classes:
        check_known(
            name, classes, "ingress.public_latency_classes", f"{name!r} is no class", "classes"
        )
    segments = config.ingress.segments
    check_that(
        len(segments) <= _MAX_SEGMENTS and OTHER_SEGMENT not in segments,
        "ingress.segments",
        f"{len(segments)} names; name at most {_MAX_SEGMENTS}, none of them `other`",
    )
    _check_rollouts(config)
    taken: dict[int, str] = {}
    for name, (_, port) in config.listeners.items():
        path = f"{name}.port"
        former = taken.setdefault(port, path)
        check_that(former == path, path, f"{port} is already {former}; change one")


def _check_target(config: Config) -> None:
    """Raise ConfigError for a target without a model, or for adapters that it cannot serve."""
    engine, path = config.target.engine, "target.engine"
    check_that(
        engine.model,
        f"{path}.model",
        "no model is named; set it to a Hugging Face folder or hub name",
    )
    count = len(engine.adapters)
    check_that(
        count <= _MAX_ADAPTERS,
        f"{path}.adapters",
        f"{count} adapters; at most {_MAX_ADAPTERS} are served",
    )
    for name in engine.adapters:
        check_that(
            _MODEL_NAME.fullmatch(name) and name != config.model_name,
            f"{path}.adapters.{name}",
            "an adapter's name may hold up to 128 letters, digits, '.', '_', '/' and '-', and may "
            "not be the model's own",
        )


def check_drafters(config: Config) -> None:
    """Raise ConfigError for a cascade whose stages cannot be its own, or for a task class that
    names a drafter twice, one that there is not, or one that drafts in another's place."""
    drafters, cascades = config.drafters, config.stage_of
    for name, drafter in drafters.items():
        path = f"drafters.{name}.options.stages"
        for stage in drafter.stages:
            _check_drafter(stage, config, path)
            kind, owner = drafters[stage].kind, cascades[stage]
            check_that(kind != CASCADE, path, f"{stage!r} is a cascade; name its stages instead")
            check_that(kind != RECORDER, path, f"{stage!r} is a recorder, which drafts nothing")
            check_that(owner == name, path, f"{stage!r} is a stage of {owner!r} already")
            drafters[stage].check_resident(f"drafters.{stage}")
    for task, names in config.tasks.items():
        path = f"tasks.{task}"
        for name in names:
            check_that(names.count(name) == 1, path, f"{name!r} stands twice; name it once")
            _check_drafter(name, config, path)
            _check_no_stage(name, config, path, "name that one")
            rollout = drafters[name].rollout
            check_that(
                rollout is None,
                path,
                f"{name!r} takes the place of {rollout and rollout.replaces!r} by itself; name "
                "that one alone",
            )


def _check_drafter(name: str, config: Config, path: str) -> None:
    check_known(name, config.drafters, path, f"no drafter is named {name!r}", "drafters")


def _check_no_stage(name: str, config: Config, path: str, remedy: str) -> None:
    """Raise ConfigError for a drafter that is a stage of a cascade, which is what to name."""
    owner = config.stage_of.get(name)
    check_that(owner is None, path, f"{name!r} is a stage of {owner!r}; {remedy}")


def _check_rollouts(config: Config) -> None:
    """Raise ConfigError for a rollout that makes no sense."""
    drafters, residents = config.drafters, config.residents
    replaced = dict[str, str]()
    for name, rollout in config.rollouts.items():
        path, former = f"drafters.{name}.rollout.replaces", rollout.replaces
        check_that(former, path, "empty; name the drafter whose place it is to take")
        check_that(
            former != name, path, "a drafter cannot replace itself; name the one that serves now"
        )
        _check_no_stage(former, config, path, "replace that one")
        others = [each for each in config.on_their_own if each != name]
        check_known(former, others, path, f"no drafter of its own is named {former!r}", "drafters")
        _check_no_stage(name, config, path, "roll that one out")
        drafter, other = drafters[name], drafters[former]
        inside = name if name in residents else former
        for holds, reason in (
            (
                RECORDER not in (drafter.kind, other.kind),
                "a recorder drafts nothing; it neither takes nor leaves a drafter's place",
            ),
            (other.rollout is None, f"{former!r} is in a rollout itself; end that one first"),
            (
                former not in replaced,
                f"{replaced.get(former)!r} is to replace {former!r} already; roll out one at a "
                "time",
            ),
            (
                not drafter.shadow and not other.shadow,
                "a shadow is never verified; remove shadow: true",
            ),
            (
                (name in residents) == (former in residents),
                f"{inside!r} runs inside the target and the other one does not, so nobody sees the "
                "trees of both; give both the same placement",
            ),
        ):
            check_that(holds, path, reason)
        replaced[former] = name


def _check_elsewhere(name: str, drafter: DrafterConfig) -> None:
    """Raise ConfigError for what the application that the drafter is part of must say."""
    named = DrafterConfig(
        kind=drafter.kind,
        shadow=drafter.shadow,
        rollout=drafter.rollout,
        placement=DrafterPlacement(application=drafter.application),
    )
    check_that(
        drafter == named,
        f"drafters.{name}",
        f"the drafter is part of application {drafter.application}; beside placement: "
        "{application: NAME} only kind, shadow and rollout may be said here, all else there",
    )
