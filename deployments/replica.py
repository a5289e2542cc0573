"""What every worker replica does beside its work: be found, say where it runs and what it counts,
end in order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import ray
from prometheus_client.metrics_core import Metric as Family
from ray import serve
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.serve.schema import ReplicaState
from ray.util import metrics as ray_metrics

from cluster import logs
from cluster.config.doors import LOOPBACK
from cluster.config.live import changed
from cluster.config.schema import Config
from cluster.errors import ConfigError
from cluster.metrics.recorder import Recorder
from cluster.plan.autoscaling import CPU, Statistics
from cluster.rpc.link import end_tasks
from cluster.rpc.server import serve_worker
from cluster.rpc.trust import Trust, trust_of
from deployments.endpoints import ADDRESS_KEY, WORKER_KEY

log = logging.getLogger(__name__)

# Where Ray keeps the secret of the data plane, for a configuration that names no file with one.
_NAMESPACE = "drafthouse"
_KEY = "data-plane-secret"


def listen_address(config: Config) -> str:
    """Where this node's replicas listen for other parts of the application.

    Raises ConfigError for loopback in a cluster of several nodes.
    """
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    return address_for(config.network.interface, num_nodes, str(ray.util.get_node_ip_address()))


def address_for(interface: str, num_nodes: int, node_address: str) -> str:
    """`listen_address`, as a function of what it depends on."""
    if interface == "node":
        return node_address
    if num_nodes > 1:
        raise ConfigError.at(
            "network.interface",
            f"on loopback the parts cannot reach each other, for this Ray has "
            f"{num_nodes} nodes; set it to node",
        )
    return LOOPBACK


def process_id(role: str) -> str:
    """A name for this process that no other process ever had."""
    return f"{role}-{ray.get_runtime_context().get_actor_id()[:12]}-{os.getpid()}"


def where() -> dict[str, Any]:
    """Node and devices of this process, for people and for tests of placement."""
    context = ray.get_runtime_context()
    return {
        "node_id": context.get_node_id(),
        "address": str(ray.util.get_node_ip_address()),
        "resources": dict(context.get_assigned_resources()),
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "gpu_ids": [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])],
        "pid": os.getpid(),
    }


def told_at_start() -> Any:
    """Return the deployment's user_config; Serve itself tells it only after the constructor."""
    return serve.get_replica_context()._deployment_config.user_config


def has_others() -> bool:
    """True if other replicas of this one's deployment run already.

    Serve may end one of them as soon as this one's constructor has returned."""
    own = serve.get_replica_context()
    try:
        found = serve.status().applications[own.app_name].deployments[own.deployment]
    except (RayError, KeyError):  # Serve's controller begins anew, and knows nothing yet
        return False
    return bool(found.replica_states.get(ReplicaState.RUNNING))


def trust_in(config: Config, role: str) -> Trust:
    """Return what a replica of that role shows to others and asks of them.

    Raises ConfigError for files that cannot be used."""
    trust = trust_of(config.data_plane, role)
    if trust.secrets is not None:
        return trust
    # Drawn by the first process that asks.  Whoever can read it there may also run code in the
    # cluster, so it opens nothing that was closed.
    drawn = secrets.token_hex(32)
    internal_kv._internal_kv_put(_KEY, drawn, overwrite=False, namespace=_NAMESPACE)
    secret: str = internal_kv._internal_kv_get(_KEY, namespace=_NAMESPACE).decode()
    return replace(trust, secrets=lambda: (secret,))


class Replica:
    """What Serve, and those who hold a handle, may ask of every replica.

    Whatever its constructor begins it also tells `_ending` how to end: Serve ends a replica whose
    constructor has failed, too."""

    _part: Any  # what serves, with `use` and `refuse_config`

    def _begin(self, config: Config, role: str) -> None:
        """What the constructor of each does first; raises as `trust_in` does.

        Our own messages go to the replica's stderr, which Ray keeps in a file of its own: Serve
        configures only its own logger."""
        logs.configure(config.log_format)
        self._config = config  # that it was started with
        self._ending, self._demand = AsyncExitStack(), Demand()
        self._trust = trust_in(config, role)

    def _go_on(self, *forever: Coroutine[Any, Any, None]) -> None:
        """Do all of this beside everything else, until the replica ends."""
        self._ending.push_async_callback(end_tasks, *map(asyncio.create_task, forever))

    async def __del__(self) -> None:
        """Serve awaits it: what was begun last ends first."""
        await self._ending.aclose()

    async def reconfigure(self, user_config: Any) -> None:
        """Serve calls it after the constructor and when the file's user_config has changed.

        Nothing is raised: Serve would replace the replica, with all that it is serving."""
        try:
            await self._use(changed(self._config, user_config))
        except ConfigError as error:
            log.error("the configuration stays as it is: %s", error.message)
            self._part.refuse_config(error.message)
        else:
            log.info("reconfigured")

    async def _use(self, config: Config) -> None:
        await self._part.use(config)

    async def placement(self) -> dict[str, Any]:
        """Node and devices of the replica."""
        return where()

    async def note_demand(self, coordinator: str, said: Statistics) -> None:
        """A coordinator says what is asked of all replicas of this kind together."""
        self._demand.note(coordinator, said)


class WorkerReplica(Replica):
    """The part of a worker's deployment that all have: its own gRPC server, and how it is found."""

    _metadata: Mapping[str, str]  # where it listens, or why it does not

    async def _listen(
        self,
        worker: Any,
        statistics: Callable[[], Statistics],
    ) -> None:
        """Serve the worker.  statistics: what autoscaling is to know of this replica.

        When it ends, the server refuses new streams and lets the open ones end: their last frames
        are on their way, and no more is waited for, because every peer can continue elsewhere."""
        server = await serve_worker(
            worker,
            listen_address(self._config),
            max_frame_bytes=self._config.coordinator.max_frame_bytes,
            trust=self._trust,
        )
        self._ending.push_async_callback(server.stop)
        self._statistics = statistics
        self._metadata = {ADDRESS_KEY: server.address, WORKER_KEY: worker.describe().worker_id}

    async def record_replica_metadata(self) -> Mapping[str, str]:
        """Serve passes this on to whoever holds a handle."""
        return self._metadata

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks for it where the deployment has an `autoscaling_config`.

        A replica that cannot work says nothing, and so its deployment is not scaled."""
        if not hasattr(self, "_statistics"):
            return {}
        return {**self._statistics(), **self._demand.total()}


def cpu_use() -> Callable[[], Statistics]:
    """Return what says how many cores this process has used, with all of its threads, since it was
    asked last."""
    process = psutil.Process()
    process.cpu_percent()  # from now on
    return lambda: {CPU: process.cpu_percent() / 100.0}


# Coordinators tell replicas what is asked of all of them, which no replica sees by itself.
#
# By a call of Serve's to each replica, every two seconds: autoscaling goes by it, and no token.

# A call costs milliseconds, and whoever scales waits for seconds before it does.
_TELL_EVERY_S = 2.0
# What a coordinator said so long ago is not true any more: it may be gone.
_VALID_S = 5.0


@dataclass(slots=True)
class Demand:
    """What coordinators have said of late, at one replica.  said: by coordinator, with the time."""

    clock: Callable[[], float] = time.monotonic
    said: dict[str, tuple[float, Statistics]] = field(default_factory=dict)

    def note(self, coordinator: str, said: Statistics) -> None:
        """A coordinator says what is asked of this replica and of all of its kind together."""
        self.said[coordinator] = self.clock(), said

    def total(self) -> dict[str, float]:
        """Return the sum over the coordinators that are there."""
        now, total = self.clock(), defaultdict[str, float](float)
        for at, said in self.said.values():
            if now - at < _VALID_S:
                for key, value in said.items():
                    total[key] += value
        return total


async def tell_forever(
    coordinator: str, demands: Callable[[], Iterable[tuple[Any, Statistics]]]
) -> None:
    """Tell replicas what is asked of them.  demands: with Serve's handles, which reach them."""
    while True:
        await asyncio.sleep(_TELL_EVERY_S)
        await asyncio.gather(*(_tell(handle, coordinator, said) for handle, said in demands()))


async def _tell(handle: Any, coordinator: str, said: Statistics) -> None:
    try:
        answers = handle.broadcast("note_demand", coordinator, dict(said))
        await answers.results_async(timeout_s=_TELL_EVERY_S, return_exceptions=True)
    except Exception as error:  # noqa: BLE001 - Serve's errors have no common base; it is told again
        log.debug("demand was not told: %s", type(error).__name__)


# Mirrors our metrics into Ray's metrics agent, so that the dashboard's Prometheus has them.
#
# Ray exports them with the prefix `ray_` and a few seconds' delay; our own /metrics is live.  The
# mirror runs on a timer of its own and costs no token anything.

# The name and the labels of a sample.
Series = tuple[str, tuple[tuple[str, str], ...]]

_EXPORT_EVERY_S = 2.0


class Exporter:
    """Copies the values of one `Recorder`; tags are the labels.

    Counters are passed on as increments.  A histogram becomes gauges with the names, labels and
    values of its `_bucket`, `_sum` and `_count`, because Ray's histograms take single observations
    only; `rate` and `histogram_quantile` ask for no more.
    """

    def __init__(self, recorder: Recorder, refresh: Callable[[], object] = lambda: None) -> None:
        """refresh: called on the event loop before each copy, to bring gauges up to date."""
        self._recorder = recorder
        self._refresh = refresh
        self._metrics: dict[str, Any] = {}  # Ray's, by name
        self._counted: dict[Series, float] = {}
        self._gauges: set[Series] = set()

    async def run_forever(self) -> None:
        """Copy every value again and again."""
        while True:
            await asyncio.sleep(_EXPORT_EVERY_S)
            self._refresh()
            # Reading hundreds of series takes a few milliseconds: not on the event loop.
            await asyncio.to_thread(self._export)

    def _export(self) -> None:
        gauges: set[Series] = set()
        for family in self._recorder.collect():
            for sample in family.samples:
                # Ray's names have no colon, and its own vLLM's are told likewise.
                name, tags = sample.name.replace(":", "_"), dict(sample.labels)
                series = name, tuple(sorted(tags.items()))
                if family.type != "counter":
                    self._metric(ray_metrics.Gauge, name, family, tags).set(sample.value, tags=tags)
                    gauges.add(series)
                    continue
                increment = sample.value - self._counted.get(series, 0.0)
                self._counted[series] = sample.value
                if increment > 0:
                    # Ray appends `_total` to counters itself.
                    name = name.removesuffix("_total")
                    self._metric(ray_metrics.Counter, name, family, tags).inc(increment, tags=tags)
        for name, labels in self._gauges - gauges:
            # Ray's agent would repeat the last value of what is no more, for ever.
            self._metrics[name].set(0.0, tags=dict(labels))
        self._gauges = gauges

    def _metric(self, kind: Any, name: str, family: Family, tags: Mapping[str, str]) -> Any:
        if name not in self._metrics:
            self._metrics[name] = kind(name, description=family.documentation, tag_keys=tuple(tags))
        return self._metrics[name]
