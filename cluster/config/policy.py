"""The file of `coordinator.policy`: which requests get drafts, and whose.

`drafthouse evaluate` writes such a file from measured pairs; see docs/policy.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.config.file import in_file, read_document
from cluster.config.parse import nearest, parse
from cluster.config.schema import Config
from cluster.errors import ConfigError

DEFAULT_TASK = "default"
Drafts = Literal["on", "measure", "off"]
LawName = Literal["greedy", "sampled"]


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """A rule for the requests that meet all of its conditions."""

    task: str = ""
    """Requests of this task class; empty = all. `default` stands for those of no class, and of
    unknown ones."""
    segment: str = ""
    """Requests of this segment; empty = all."""
    law: Literal["", "greedy", "sampled"] = ""
    """greedy = requests with temperature 0, sampled = all others; empty = both."""
    drafts: Drafts = "measure"
    """off = no drafts. on and measure = the control loop decides in every step, within what the
    guard allows; measure says that too little is known yet to say on or off."""
    drafters: tuple[str, ...] | None = None
    """The only ones that are asked, of those that the task and the request allow; null = all."""

    def fits(self, task: str, segment: str, law: str) -> bool:
        """True if the rule is for such a request."""
        pairs = ((self.task, task), (self.segment, segment), (self.law, law))
        return all(wanted in ("", found) for wanted, found in pairs)


# What holds where no rule fits.
NO_RULE = PolicyRule()


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """The file that coordinator.policy names."""

    rules: tuple[PolicyRule, ...] = ()
    """The first that fits a request holds for it; where none fits, all is as without a policy."""

    def rule_for(self, task: str, segment: str, law: str) -> PolicyRule:
        """Return the rule that holds for such a request."""
        return next((rule for rule in self.rules if rule.fits(task, segment, law)), NO_RULE)


def read_policy(config: Config) -> PolicyFile:
    """Read and check the file of `coordinator.policy`, where the configuration names one.

    Raises ConfigError with the file, the rule and the remedy."""
    if not config.coordinator.policy:
        return PolicyFile()
    path = Path(config.coordinator.policy)
    with in_file(path):
        policy = parse(PolicyFile, read_document(path, "docs/policy.md"))
        for place, rule in enumerate(policy.rules):
            named = {"task": ((rule.task,) if rule.task else (), (*config.tasks, DEFAULT_TASK)),
                     "drafters": (rule.drafters or (), config.on_their_own)}  # fmt: skip
            for key, (names, known) in named.items():
                for name in names:
                    if name not in known:
                        raise ConfigError.at(
                            f"rules[{place}].{key}",
                            f"{name!r} is not configured ({nearest(name, known, 'known')})",
                        )
    return policy
