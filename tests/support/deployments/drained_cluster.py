"""A node with a replica that answers is drained: prints, as JSON, who answered and how it ended.

A program, because it has a Ray of its own with three nodes.
"""

import asyncio
import json
import subprocess
import sys

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.support.deployments.shares import before_others

_STORE = 80 * 2**20
# Thrice what the drain may take.  A node that ended as it began would be waited for without an end.
_PATIENCE_S = 300


@ray.remote(num_cpus=0)
class Gate:
    """Holds up who waits until it is opened."""

    def __init__(self) -> None:
        self._is_open = asyncio.Event()
        self._is_waited_for = asyncio.Event()

    async def wait(self) -> None:
        self._is_waited_for.set()
        await self._is_open.wait()

    async def somebody_waits(self) -> None:
        await self._is_waited_for.wait()

    async def open(self) -> None:
        self._is_open.set()


@serve.deployment(ray_actor_options={"num_cpus": 1}, graceful_shutdown_timeout_s=30)
class Answering:
    async def __call__(self, gate: object = None) -> str:
        if gate is not None:
            await gate.wait.remote()
        return str(ray.get_runtime_context().get_node_id())


def main() -> None:
    head = {"num_cpus": 0, "object_store_memory": _STORE, "include_dashboard": False}
    with before_others():
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1, object_store_memory=_STORE)
    ray.init(address=cluster.address, log_to_driver=False)
    stays = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    gate = Gate.options(scheduling_strategy=stays).remote()
    serve.start(proxy_location="Disabled")
    handle = serve.run(Answering.bind())
    before = handle.remote().result()
    under_way = handle.remote(gate)
    ray.get(gate.somebody_waits.remote())
    with before_others():
        cluster.add_node(num_cpus=1, object_store_memory=_STORE)
    words = f"-m deployments.drain --address {cluster.address} --node-id {before} --within 100"
    drain = subprocess.Popen([sys.executable, *words.split()], stderr=subprocess.PIPE, text=True)
    while (after := handle.remote().result(timeout_s=_PATIENCE_S)) == before:
        pass  # every question is answered, whichever replica gets it
    had_ended = drain.poll() is not None
    ray.get(gate.open.remote())
    answered = under_way.result()
    _, told = drain.communicate()
    found = {
        "before": before,
        "after": after,
        "answered": answered,
        "had_ended": had_ended,
        "code": drain.returncode,
        "told": told,
    }
    sys.stdout.write(f"\n{json.dumps(found)}\n")  # between lines of Ray's
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
