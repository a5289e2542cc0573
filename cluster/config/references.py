"""What the keys of drafters must obey beside those of others: tasks, cascades, rollouts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cluster.config.parse import check_known, check_that
from cluster.config.processes import CASCADE, RECORDER, DrafterConfig, DrafterPlacement

Drafters = Mapping[str, DrafterConfig]
Tasks = Mapping[str, Sequence[str]]


def stages_of(drafters: Drafters) -> dict[str, str]:
    """Return the cascade of each drafter that is a stage of one."""
    return {stage: name for name, each in drafters.items() for stage in each.stages}


def check_tasks(tasks: Tasks, drafters: Drafters) -> None:
    """Raise ConfigError for a task class that names a drafter twice, one that there is not, or one
    that drafts in another's place."""
    cascades = stages_of(drafters)
    for task, names in tasks.items():
        path = f"tasks.{task}"
        for name in names:
            check_that(names.count(name) == 1, path, f"{name!r} stands twice; name it once")
            _check_drafter(name, drafters, path)
            reason = f"{name!r} is a stage of {cascades.get(name)!r}; name that one"
            check_that(name not in cascades, path, reason)
            rollout = drafters[name].rollout
            check_that(
                rollout is None,
                path,
                f"{name!r} takes the place of {rollout and rollout.replaces!r} by itself; name "
                "that one alone",
            )


def check_stages(drafters: Drafters) -> None:
    """Raise ConfigError for a cascade whose stages cannot be its own."""
    cascades = stages_of(drafters)
    for name, drafter in drafters.items():
        path = f"drafters.{name}.options.stages"
        for stage in drafter.stages:
            _check_drafter(stage, drafters, path)
            kind, owner = drafters[stage].kind, cascades[stage]
            check_that(kind != CASCADE, path, f"{stage!r} is a cascade; name its stages instead")
            check_that(kind != RECORDER, path, f"{stage!r} is a recorder, which drafts nothing")
            check_that(owner == name, path, f"{stage!r} is a stage of {owner!r} already")
            drafters[stage].check_resident(f"drafters.{stage}")


def _check_drafter(name: str, drafters: Drafters, path: str) -> None:
    check_known(name, drafters, path, f"no drafter is named {name!r}", "drafters")


def check_rollouts(drafters: Drafters, residents: Collection[str]) -> None:
    """Raise ConfigError for a rollout that makes no sense.  residents: run inside the target."""
    cascades, replaced = stages_of(drafters), dict[str, str]()
    for name, drafter in drafters.items():
        if drafter.rollout is None:
            continue
        path, former = f"drafters.{name}.rollout.replaces", drafter.rollout.replaces
        for holds, reason in (
            (former, "empty; name the drafter whose place it is to take"),
            (former != name, "a drafter cannot replace itself; name the one that serves now"),
            (
                former not in cascades,
                f"{former!r} is a stage of {cascades.get(former)!r}; replace that one",
            ),
        ):
            check_that(holds, path, reason)
        others = [each for each in drafters if each not in (name, *cascades)]
        reason = f"no drafter of its own is named {former!r}"
        check_known(former, others, path, reason, "drafters")
        other = drafters[former]
        inside = name if name in residents else former
        for holds, reason in (
            (
                name not in cascades,
                f"{name!r} is a stage of {cascades.get(name)!r}; roll that one out",
            ),
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


def check_elsewhere(name: str, drafter: DrafterConfig) -> None:
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
