"""`python -m deployments.drain`: empty a node of Ray before it ends.

Pods run it on themselves as their preStop hook, for Ray itself would end at once, with all that it
runs.  Serve starts elsewhere what runs on the node, and then ends it in order: an ingress answers
what is under way.  What finds no room elsewhere ends when the time is almost over.
"""

from __future__ import annotations

import argparse
import sys
import time

import ray
from ray._private import state
from ray._private.worker import global_worker
from ray.core.generated import autoscaler_pb2

from cluster.errors import WorkerError
from cluster.options import DAY_S, positive

_POLL_S = 0.5


def drain(node_id: str, within_s: float) -> bool:
    """Move everything off a node; Ray is initialised.  Returns True if nothing is left there.

    Raises WorkerError when Ray refuses.
    """
    ends_at = time.monotonic() + within_s
    # For good: a node that is drained because it idles goes back to work where something starts.
    is_accepted, reason = global_worker.gcs_client.drain_node(
        node_id,
        autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION,
        "it is about to end",
        int((time.time() + within_s) * 1000),
    )
    if not is_accepted:
        raise WorkerError(f"Ray does not drain node {node_id}: {reason}")
    last = -1
    while num_left := _num_actors(node_id):
        if num_left != last:
            sys.stderr.write(f"{num_left} processes are left on node {node_id}\n")
            last = num_left
        if time.monotonic() > ends_at:
            return False
        time.sleep(_POLL_S)
    return True


def _num_actors(node_id: str) -> int:
    actors = state.actors(actor_state_name="ALIVE").values()
    return sum(actor["Address"]["NodeID"] == node_id for actor in actors)


def main() -> int:
    """Drain the node that this runs on, or the one that is named; 1 where something is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--within", type=positive(DAY_S), default=120.0, metavar="SECONDS")
    parser.add_argument("--address", help="of the cluster; RAY_ADDRESS, or this machine's own")
    parser.add_argument("--node-id", help="this machine's own by default")
    arguments = parser.parse_args()
    ray.init(address=arguments.address or "auto", log_to_driver=False)
    node_id = arguments.node_id or ray.get_runtime_context().get_node_id()
    return 0 if drain(node_id, arguments.within) else 1


if __name__ == "__main__":
    sys.exit(main())
