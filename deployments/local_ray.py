"""Ray for one command: started here, or joined; and ended so that nothing is left behind."""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve

from cluster.config import Config, PlacementConfig
from cluster.errors import ConfigError
from deployments.ingress.servicers import MESSAGE_LIMIT, message_limit
from deployments.placement import total_resources
from deployments.processes import adopt_orphans, end_descendants

log = logging.getLogger(__name__)

# Requests and answers are small; anything above 100 kB (a large prompt) passes through it once.
_OBJECT_STORE_BYTES = 256 * 2**20
_DRAIN_S = 10.0
_SHUTDOWN_S = 15.0
_PROCESS_GRACE_S = 3.0


class LocalRay:
    """A Ray node of this command's own, in a short-lived folder (socket paths must be short)."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._folder: Path | None = None

    def start(self) -> None:
        """Start Ray's processes below this one.  Raises ConfigError when the machine lacks GPUs."""
        # Local and short-lived: Ray's token would only lock the user out of the dashboard.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Workers at nice 15, Ray's default, leave drafters no room to stand back behind the target.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S", "1")
        os.environ.setdefault(MESSAGE_LIMIT, str(message_limit(self._config.ingress)))
        # Actors that reserve no GPU still see them: `device: auto` uses one without any flag.
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        adopt_orphans()
        self._folder = Path(tempfile.mkdtemp(prefix="drafthouse-", dir="/tmp"))
        wanted = total_resources(self._config)
        dashboard = self._config.dashboard
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, math.ceil(wanted.get("CPU", 0.0))),
            resources={name: wanted[name] for name in wanted if name not in ("CPU", "GPU")},
            labels=local_labels(self._config),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=dashboard.enabled,
            dashboard_host=dashboard.host,
            dashboard_port=dashboard.port,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _temp_dir=str(self._folder),
        )
        num_gpus = ray.cluster_resources().get("GPU", 0.0)
        if wanted.get("GPU", 0.0) > num_gpus:
            raise ConfigError(
                f"placement: num_gpus of all replicas are {wanted['GPU']:g}, this machine has "
                f"{num_gpus:g}; lower them, or join a larger cluster with --address",
                param="placement",
            )

    def stop(self) -> None:
        """End everything and remove the folder.  Must not be interrupted by signals.

        Streams that still run are given a few seconds.
        """
        if ray.is_initialized():
            _within(_DRAIN_S, serve.shutdown)
            _within(_SHUTDOWN_S, ray.shutdown)
        end_descendants(_PROCESS_GRACE_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class JoinedRay:
    """A cluster that runs already; only our application on it is ours to end."""

    def __init__(self, address: str, application: str) -> None:
        self._address = address
        self._application = application

    def start(self) -> None:
        """Connect; raises ConfigError when nothing answers at the address."""
        try:
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            raise ConfigError(
                f"--address {self._address}: no Ray cluster answers there ({error})"
            ) from error

    def stop(self) -> None:
        """Remove the application and disconnect."""
        if ray.is_initialized():
            # The request to delete may have been taken when the answer does not come.
            _within(_DRAIN_S + _SHUTDOWN_S, lambda: serve.delete(self._application))
            _within(_SHUTDOWN_S, ray.shutdown)


def _within(timeout_s: float, step: Callable[[], object]) -> None:
    """Run `step`, but wait for it only so long: a Ray that is half started may never answer."""

    def run() -> None:
        try:
            step()
        except Exception:
            # Whatever it is, the processes are ended next.
            log.info("Ray did not shut down in order", exc_info=True)

    thread = threading.Thread(target=run, name="shutdown", daemon=True)
    thread.start()
    thread.join(timeout_s)


def local_labels(config: Config) -> dict[str, str]:
    """The node labels that `config` asks for, all of which the one local node then carries."""
    labels: dict[str, str] = {}
    for placement in _placements(config):
        for key, value in placement.labels.items():
            if labels.setdefault(key, value) != value:
                raise ConfigError(
                    f"placement.labels: {key} is {labels[key]!r} here and {value!r} there, and one "
                    "machine cannot be both; join a cluster of several nodes with --address",
                    param="placement.labels",
                )
    return labels


def _placements(config: Config) -> list[PlacementConfig]:
    parts: list[Any] = [config.target, config.coordinator, config.ingress]
    return [part.placement for part in (*parts, *config.drafters.values())]
