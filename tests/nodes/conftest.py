"""An application on four Ray nodes, whose processes, nodes and links are disturbed."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from string import Template
from typing import Any

import httpx
import pytest

from cluster.records import frozen
from tests.deployments.conftest import free_port
from tests.support.checkpoints import noisy_copy
from tests.support.deployments.nodes import Node, Nodes, need_nodes
from tests.support.draft.other_vocabulary import other_copy

MODEL, CONFIG = "tiny", "cluster.yaml"
GRPC_PORT = 9000  # in the nodes' own namespaces, where nobody else listens
START_S = 180.0


@frozen
class Cluster:
    """The nodes, the ingresses' port for HTTP, a folder for files, and two models."""

    nodes: Nodes
    http_port: int
    folder: Path
    target: Path
    drafter: Path
    commands: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def serve(
        self, config: Path, *options: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Serve the file in place of what is served, until the end.  environment: what is added to
        the command's."""
        with (self.folder / f"serve-{len(self.commands)}.log").open("wb") as output:
            command = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "deployments.cli",
                    "serve",
                    str(config),
                    "--address",
                    self.nodes.gcs,
                    *options,
                ],
                env={**self.nodes.environment, **(environment or {})},
                stdout=output,
                stderr=output,
                cwd=self.folder,  # where no code is
            )
        self.commands.append(command)

    @property
    def grpc_addresses(self) -> list[str]:
        """Where ingresses may listen: two of them do."""
        return [f"{node.address}:{GRPC_PORT}" for node in self.nodes.nodes]

    @property
    def urls(self) -> list[str]:
        """Where ingresses may listen: two of them do."""
        return [f"http://{node.address}:{self.http_port}" for node in self.nodes.nodes]

    def url(self) -> str:
        """One of those that answer."""
        for url in self.urls:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{url}/health", timeout=2)
                return url
        raise AssertionError("no ingress answers")

    def replicas(self, deployment: str) -> list[tuple[Node, int]]:
        """Node and process of each replica."""
        title = f"ray::ServeReplica:drafthouse:{deployment}"
        return [(node, pid) for node in self.nodes.nodes for pid in node.pids(title)]

    def health(self) -> list[dict[str, Any]]:
        """The state that each ingress sees, of those that answer."""
        found = []
        for url in self.urls:
            with contextlib.suppress(httpx.HTTPError, ValueError):
                found.append(dict(httpx.get(f"{url}/health", timeout=2).json()))
        return found


@pytest.fixture(scope="session")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, checkpoint_factory: Callable[..., Path]
) -> Iterator[Cluster]:
    need_nodes()
    target = checkpoint_factory("llama", max_position_embeddings=4096)
    drafters = tmp_path_factory.mktemp("drafter")
    drafter = other_copy(noisy_copy(target, drafters / "noisy"), drafters / "other")
    folder = tmp_path_factory.mktemp("cluster")
    port = free_port()
    config = Template(Path(__file__).with_name(CONFIG).read_text("utf-8"))
    (folder / CONFIG).write_text(
        config.substitute(target=target, drafter=drafter, http_port=port, grpc_port=GRPC_PORT)
    )
    slots = '{"target": 2, "coordinator": 1, "ingress": 1, "drafter": 2}'
    # Two of them are those of configs/two-node.yaml, too, with GPUs in name only.
    labels = [f"--labels=ray.io/node-group={group}" for group in ("target", "draft", "others")]
    options = [(f"--resources={slots}", "--num-gpus=1", label) for label in labels]
    # Ray's sockets have long names, and a socket's path at most 107 characters.
    with (
        tempfile.TemporaryDirectory(prefix="dh", ignore_cleanup_errors=True) as ray,
        Nodes(Path(ray) / "r", folder, options) as nodes,
    ):
        found = Cluster(nodes, port, folder, target, drafter)
        try:
            found.serve(folder / CONFIG)
            wait_until_whole(found)
            yield found
        finally:
            for command in found.commands:
                command.kill()  # the nodes end next, so there is nothing to put in order
                command.wait()


def is_whole(cluster: Cluster) -> bool:
    """True if all parts are there, whichever ingress answers."""
    states = cluster.health() + cluster.health()
    return bool(states) and all(
        (state["coordinators"], state["targets"]) == (2, 2)
        and state["drafters"] == {"lm": 1, "lookup": 1, "suffix": 1, "recorder": 2}
        for state in states
    )


def wait_until_whole(cluster: Cluster, deadline_s: float = START_S) -> None:
    """Wait for all parts.  Ray may end a node that was cut off, late after its link is back; it is
    started anew, as KubeRay does.  No other node may end."""
    end = time.monotonic() + deadline_s
    while not is_whole(cluster):
        for node in cluster.nodes.nodes:
            if node.raylet.poll() is not None:
                assert node.was_cut_off, f"the raylet of {node.address} has ended"
                cluster.nodes.kill(node)
                cluster.nodes.start(node)
        assert time.monotonic() < end, f"not whole after {deadline_s:g} s: {cluster.health()}"
        time.sleep(0.1)
