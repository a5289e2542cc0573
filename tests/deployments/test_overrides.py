"""What a file says of single deployments is what `drafthouse serve` starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cluster.errors import ConfigError
from deployments.app import build
from deployments.deploying import with_options

ARGUMENTS = {"target": {"engine": {"model": "m"}}}


def options_of_coordinator(**given: Any) -> Any:
    """Return what Serve is told of the coordinator."""
    coordinator = build(ARGUMENTS)._bound_deployment.init_args[1]
    return with_options(coordinator._bound_deployment, given)._deployment_config


def test_each_deployment_has_what_the_file_says_of_it() -> None:
    assert options_of_coordinator().num_replicas == 1
    assert options_of_coordinator(num_replicas=3).num_replicas == 3
    assert options_of_coordinator(max_surge_percent=100).max_surge_percent == 100
    scaled = options_of_coordinator(autoscaling_config={"min_replicas": 2, "max_replicas": 4})
    assert scaled.autoscaling_config.max_replicas == 4


@pytest.mark.parametrize(
    "given",
    [
        {"max_surge_percent": 101},
        {"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}},
        {"autoscaling_config": {"max_replicas": 2}, "num_replicas": 2},
        {"num_replicas": 0},
    ],
)
def test_what_serve_does_not_take_is_named_with_its_deployment(given: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"deployments\[coordinator\]: Ray Serve does not take"):
        options_of_coordinator(**given)
