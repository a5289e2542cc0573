"""The policy by which Ray Serve scales a deployment: `policy` of its `autoscaling_config`."""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.config import AutoscalingContext

from cluster.plan.autoscaling import decide

# Serve's controller, in which this runs, keeps what its own logger says.
log = logging.getLogger("ray.serve.autoscaling")


class ByStatistics:
    """Asks `cluster.plan.autoscaling` at every turn of Serve's control loop, ten times a second.

    Serve unpickles the class in its controller, and applies `upscale_delay_s`,
    `downscale_delay_s` and the bounds to the answers.
    """

    _target: int | None = None
    _why = ""

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas that there should be, and no state for Serve to keep."""
        target, num = context.target_num_replicas, context.current_num_replicas
        if self._target not in (None, target):
            why = self._why or "its configuration says so"
            log.info(
                "replicas of %s: %s -> %s: %s", context.deployment_name, self._target, target, why
            )
        self._target = target
        said: dict[Any, dict[str, float]] = {}
        for name, series in (context.raw_metrics or {}).items():
            for replica, points in series.items():
                if points:
                    said.setdefault(replica, {})[name] = points[-1].value
        decision = decide(num, list(said.values()))
        wanted = decision.num
        if len(said) < num or num > target or (num < target and wanted > num):
            wanted = target  # new ones have not taken their part yet, or old ones are ending
        elif num < target:
            wanted = target - 1  # some find no room, and would not be needed any more
        wanted = max(wanted, 1)
        self._why = decision.why if wanted != target else ""
        return wanted, {}
