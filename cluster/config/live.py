"""What of a running target may be changed: `user_config` of its deployment in a Ray Serve file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.config.parse import parse
from cluster.config.rules import check_rules
from cluster.config.schema import Config
from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TargetUserConfig:
    """`user_config` of the deployment `target`, applied without a restart.

    adapters: in place of `target.engine.adapters`, absolute folders; null = those.
    """

    adapters: Mapping[str, str] | None = None


def changed(config: Config, user_config: Any, path: str = "user_config") -> Config:
    """`config` with what `user_config` says; raises ConfigError for what may not be.

    path: where it stands, for messages."""
    found = parse(TargetUserConfig, {} if user_config is None else user_config, path)
    if found.adapters is None:
        return config
    for name, folder in found.adapters.items():
        if not Path(folder).is_absolute():
            raise ConfigError(
                f"{path}.adapters.{name}: {folder!r} is a relative path; a target runs in another "
                "folder, so give an absolute one",
                param=f"{path}.adapters.{name}",
            )
    engine = replace(config.target.engine, adapters=found.adapters)
    result = replace(config, target=replace(config.target, engine=engine))
    check_rules(result)
    return result
