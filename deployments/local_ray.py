"""Ray for one command: started here, or joined; and ended so that nothing is left behind."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray.exceptions import AuthenticationError

from cluster.config.doors import is_everywhere, is_loopback
from cluster.config.live import INGRESS
from cluster.config.schema import Config
from cluster.errors import ConfigError, WorkerError
from cluster.worker.priority import adopt_orphans
from deployments.ingress.deployment import DRAIN_MARGIN_S
from deployments.placement import check_free, check_gpus, local_labels, total_resources
from deployments.ray_environment import HOW_TO_SHARE_A_TOKEN, check_asks_for_token, drawn_token
from deployments.replica import listen_address
from deployments.supervisor import announce, end_descendants, is_living

log = logging.getLogger(__name__)

# Requests and answers are small; anything above 100 kB (a large prompt) passes through it once.
_OBJECT_STORE_BYTES = 256 * 2**20
_SERVE_SHUTDOWN_S = 10.0
_SHUTDOWN_S = 15.0
_PROCESS_GRACE_S = 3.0
_LOOK_EVERY_S = 0.25
_ANSWER_S = 5.0
# Of Ray's processes these are needed to end in order; without a dashboard or a monitor it goes on.
_NEEDED = ("gcs_server", "raylet")
# The sections of what listens for clients.
_FACES = ("http", "grpc")


class LocalRay:
    """A Ray node of this command's own, in a short-lived folder that goes with it."""

    is_ours = True

    def __init__(self, config: Config, folder: Path, applications: Sequence[str]) -> None:
        self._config = config
        self._folder = folder
        self.log_folder = folder / "session_latest" / "logs"  # of the replicas
        self._applications = applications
        self._launcher = os.getppid()
        self._daemons: list[psutil.Process] = []

    def start(self) -> None:
        """Start Ray's processes below this one, in the environment that `ray_environment` has set.

        Raises ConfigError when the machine lacks GPUs.
        """
        adopt_orphans()
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
        self._daemons = [each for each in psutil.Process().children() if each.name() in _NEEDED]
        address = str(ray.util.get_node_ip_address())
        if self._config.network.interface == "loopback" and not is_loopback(address):
            raise WorkerError(
                f"Ray listens at {address} and not on loopback; it was imported before its "
                "environment was prepared, or is too new for this version of Drafthouse"
            )
        check_gpus(self._config, ray.cluster_resources().get("GPU", 0.0))

    def as_reached(self) -> Config:
        """The configuration: everything is on this machine."""
        return self._config

    def announce(self, document: Mapping[str, Any]) -> None:
        """Let `drafthouse apply` find what is served here."""
        announce(
            self._folder,
            self._config.http.port,
            address=ray.get_runtime_context().gcs_address,
            token=drawn_token(),
            document=document,
        )

    def token_file(self) -> Path | None:
        """A file, readable for this user only, with the token that the dashboard asks for; None
        where there is no dashboard, or the user has the token already.  It goes with the folder."""
        token = drawn_token()
        if token is None or not self._config.dashboard.enabled:
            return None
        path = self._folder / "dashboard-token"
        path.touch(mode=0o600)
        path.write_text(token)
        return path

    def stop(self, *, is_serving: bool) -> None:
        """End everything.  Must not be interrupted by signals.

        Answers that are under way are given `ingress.shutdown_grace_s`, except where the launcher
        was killed: whoever does that wants the end.
        """
        if is_serving:
            if os.getppid() == self._launcher:
                _drain(self._config, self._applications[0], self._runs)
            _within(_SERVE_SHUTDOWN_S, serve.shutdown, self._runs)
            _within(_SHUTDOWN_S, ray.shutdown)
        # What has only begun to start owes nobody an orderly end, and might take long to give it.
        end_descendants(_PROCESS_GRACE_S if is_serving else 0.0)

    def _runs(self) -> bool:
        """True while Ray's daemons do; calls that need them wait for ever afterwards."""
        return all(map(is_living, self._daemons))


@dataclass(slots=True)
class JoinedRay:
    """A cluster that runs already; only our application on it is ours to end.

    is_ours: the application is; one that was there before, only once it is deployed anew."""

    config: Config
    address: str
    applications: Sequence[str]
    is_ours: bool = False

    def start(self) -> None:
        """Connect; raises ConfigError when nothing answers at the address, when that Ray asks
        nobody for a token, and when it has nodes that the parts would not reach each other from."""
        try:
            found = ray.init(
                address=self.address, log_to_driver=False, logging_level=logging.WARNING
            )
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"--address {self.address}: no Ray cluster answers there ({error})"
            ) from error
        except AuthenticationError as error:
            raise ConfigError(
                f"--address {self.address}: {str(error).splitlines()[0]}; {HOW_TO_SHARE_A_TOKEN}"
            ) from error
        check_asks_for_token(self.address, found.dashboard_url)
        listen_address(self.config)
        self.is_ours = self.applications[0] not in serve.status().applications
        self._check_listeners()

    def _check_listeners(self) -> None:
        """Raise ConfigError where the ingress could not listen here, or would share a port."""
        num_nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        if num_nodes > 1:
            for name in _FACES:
                host = getattr(self.config, name).host
                if is_loopback(host):
                    raise ConfigError.at(
                        f"{name}.host",
                        f"{host} is for the ingress' own node, which may be any of "
                        f"{num_nodes} here; set it to 0.0.0.0",
                    )
        elif self.is_ours:
            # Of a Ray that runs already the dashboard does, too.
            dashboard = replace(self.config.dashboard, enabled=False)
            check_free(replace(self.config, dashboard=dashboard))

    def as_reached(self) -> Config:
        """The configuration with an ingress' node as the host, where it listens on all of its
        interfaces."""
        try:
            asked = ingress_of(self.applications[0]).placement.remote()
            where = asked.result(timeout_s=_ANSWER_S)
        except Exception:  # noqa: BLE001 - Serve's errors have no common base; it is asked again
            return self.config
        there: dict[str, Any] = {
            name: replace(face, host=where["address"])
            for name in _FACES
            if is_everywhere((face := getattr(self.config, name)).host)
        }
        return replace(self.config, **there)

    def stop(self, *, is_serving: bool) -> None:
        """Remove the application, where it is this command's, and disconnect."""
        if ray.is_initialized():
            # The request to delete may have been taken when the answer does not come.
            if self.is_ours:
                if is_serving:
                    _drain(self.config, self.applications[0])
                for each in self.applications:
                    _within(_SERVE_SHUTDOWN_S + _SHUTDOWN_S, partial(serve.delete, each))
            _within(_SHUTDOWN_S, ray.shutdown)


def ingress_of(application: str) -> Any:
    """Serve's handle of the ingress; Ray is initialised."""
    return serve.get_deployment_handle(INGRESS, app_name=application)


def _drain(config: Config, application: str, ray_runs: Callable[[], bool] = lambda: True) -> None:
    """Let the answers end that are under way, while all that they need still runs."""
    patience_s = config.ingress.shutdown_grace_s + DRAIN_MARGIN_S
    _within(
        patience_s,
        lambda: ingress_of(application).broadcast("drain").results(timeout_s=patience_s),
        ray_runs,
    )


def _within(
    timeout_s: float, step: Callable[[], object], ray_runs: Callable[[], bool] = lambda: True
) -> None:
    """Run `step`, but wait for it only so long, and only while Ray runs: one that is half started
    or half ended may never answer."""

    def run() -> None:
        try:
            step()
        except Exception:
            # Whatever it is, the processes are ended next.
            log.info("Ray did not shut down in order", exc_info=True)

    thread = threading.Thread(target=run, name="shutdown", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_s
    while thread.is_alive() and time.monotonic() < deadline and ray_runs():
        thread.join(_LOOK_EVERY_S)
