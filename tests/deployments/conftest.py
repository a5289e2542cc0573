"""One real Ray with one real application for all tests here that need them.

Ports are free ones, so the tests run beside a server that uses the usual ones.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from cluster.config.schema import ApiConfig, Config, HttpConfig
from cluster.records import frozen
from tests.conftest import Run, serve_file
from tests.support import clock
from tests.support.deployments.api import Api, Json
from tests.support.deployments.metrics import metric
from tests.support.deployments.shares import before_others
from tests.support.engine.adapters import write_adapter

if TYPE_CHECKING:
    from tests.support.deployments.server import Server

APPLICATION = "drafthouse"
ADAPTER = "tiny/pirate"
# Generous: other work may share the two cores of the machine.
DEADLINE_S = 300.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "application: shares the one application of these tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` runs those that are marked in one process of their own."""
    for item in items:
        if "ray_session" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.application)


@frozen
class Served:
    """Where the application answers, and what it serves.

    http: a URL.  grpc: host and port.
    """

    http: str
    grpc: str
    dashboard: str
    target_folder: Path

    @property
    def api(self) -> Api:
        return Api(self.http)

    def health(self) -> Json:
        return httpx.get(f"{self.http}/health", timeout=30, verify=False).json()

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.http, name, **labels)

    def pids(self, deployment: str) -> list[int]:
        """The processes of the deployment's replicas, of all their ranks."""
        return [place["pid"] for place in places(deployment, APPLICATION)]


def places(deployment: str, application: str) -> list[Json]:
    """Node and devices of every replica, of every rank where there are several."""
    from ray import serve

    handle = serve.get_deployment_handle(deployment, app_name=application)
    replicas = handle.broadcast("placement").results(timeout_s=DEADLINE_S)
    return [place for replica in replicas for place in replica.get("ranks", [replica])]


def wait_until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Poll until `condition` holds; fails the test at the deadline."""
    clock.wait_until(condition, deadline_s)


def deploy(document: Json) -> None:
    """Deploy a file as `serve deploy` and KubeRay do."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(document))


def is_served(url: str) -> bool:
    """Whether a server answers there, and with success."""
    try:
        return httpx.get(url, timeout=30).is_success
    except httpx.TransportError:
        return False


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    """As many different ones, none of which a connection or a worker of Ray's takes by itself
    before the server under test listens: those are above 32767 and below 20000."""
    free = []
    with contextlib.ExitStack() as stack:
        while len(free) < count:
            probe, port = stack.enter_context(socket.socket()), secrets.choice(range(20000, 32768))
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                free.append(port)
    return free


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Config]:
    """Write a file of keys by their names, each of which is its owner's key too; a configuration
    that names it."""
    from tests.support.deployments.place import write_keys

    def write(
        classes: Json | None = None, *, http: HttpConfig | None = None, **keys: Any
    ) -> Config:
        access = write_keys(tmp_path / "keys.yaml", classes, **keys)
        return Config(access=access, http=http or HttpConfig())

    return write


@pytest.fixture
def model(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy whose files may be changed."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


@pytest.fixture
def no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which no model was ever fetched."""
    monkeypatch.setenv("DRAFTHOUSE_MODELS", str(tmp_path / "models"))


@pytest.fixture
def check(llama_folder: Path, tmp_path: Path, run: Run) -> Run:
    """Check a file with these sections beside the target's."""

    def check(status: int = 0, model: Path = llama_folder, **arguments: Any) -> str:
        engine = {"model": str(model), "device": "cpu", "threads": 1}
        file = serve_file(tmp_path, {"target": {"engine": engine}, **arguments})
        return run("check", file, status=status)

    return check


@pytest.fixture(scope="session")
def server(llama_folder: Path) -> Iterator[Server]:
    """The HTTP API over a tiny target, without Ray."""
    from tests.support.deployments.server import serving, tiny_config

    with serving(tiny_config(llama_folder)) as running:
        yield running


@pytest.fixture(scope="session")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def grpc_address(server: Server) -> Iterator[str]:
    """Of the same server's gRPC."""
    from deployments.ingress.grpc_api import GrpcListener

    where = server.ingress.config.grpc

    async def start() -> GrpcListener:
        listener = GrpcListener(server.ingress, 5.0)
        await listener.start()
        return listener

    listener = server.run(start())
    yield f"{where.host}:{where.port}"
    server.run(listener.stop())


@pytest.fixture(scope="session")
def tool_folder(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.deployments.server import with_tools

    return with_tools(llama_folder, tmp_path_factory.mktemp("tools") / "model")


@pytest.fixture(scope="session")
def tool_server(tool_folder: Path) -> Iterator[Server]:
    """The same where the model's template knows tools, with other settings of its API."""
    from tests.support.deployments.server import serving, tiny_config

    api = ApiConfig(
        served_model_names=("other",),
        cors_origins=("https://page.example",),
        heartbeat_s=0.05,
        max_request_timeout_s=100,
        max_stored_responses=3,
    )
    with serving(tiny_config(tool_folder, api)) as running:
        yield running


@pytest.fixture(scope="session")
def long_folder(checkpoint_factory: Callable[..., Path]) -> Path:
    """A tiny target with room for streams that last long enough to be disturbed."""
    return checkpoint_factory("llama", max_position_embeddings=4096)


@pytest.fixture(scope="session")
def long_draft_folder(long_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.checkpoints import noisy_copy

    return noisy_copy(long_folder, tmp_path_factory.mktemp("drafter") / "noisy")


@pytest.fixture(scope="session")
def dashboard_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def ray_session(dashboard_port: int) -> Iterator[None]:
    """Ray with eight logical GPUs in two groups, which need no hardware."""
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's default of ten seconds is long for a test that waits for exported metrics.
        "RAY_metrics_report_interval_ms": "2000",
    }
    import ray
    from ray import serve

    with before_others():
        ray.init(
            address="local",
            num_cpus=64,
            num_gpus=8,
            resources={"target_slot": 4, "draft_slot": 4},
            labels={"ray.io/node-group": "demo"},
            object_store_memory=80 * 2**20,
            include_dashboard=True,
            dashboard_port=dashboard_port,
            log_to_driver=False,
        )
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def adapter_folder(long_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(long_folder, tmp_path_factory.mktemp("adapters") / ADAPTER)


@pytest.fixture(scope="session")
def served(
    ray_session: None,
    dashboard_port: int,
    long_folder: Path,
    long_draft_folder: Path,
    adapter_folder: Path,
) -> Served:
    """The application with a tiny target, an adapter of it and three kinds of drafters."""
    from ray import serve

    from deployments.app import build

    serve.start(proxy_location="Disabled", logging_config={"enable_access_log": False})
    settings = arguments(long_folder, long_draft_folder)
    settings["target"]["engine"]["adapters"] = {ADAPTER: str(adapter_folder)}
    serve.run(build(settings), name=APPLICATION)
    found = Served(
        http=f"http://127.0.0.1:{settings['http']['port']}",
        grpc=f"127.0.0.1:{settings['grpc']['port']}",
        dashboard=f"http://127.0.0.1:{dashboard_port}",
        target_folder=long_folder,
    )
    wait_until(
        lambda: found.health()["drafters"] == {"lm": 1, "lookup": 1, "ngram": 1, "suffix": 1}
    )
    return found


def arguments(target: Path, drafter: Path) -> Json:
    http, grpc = free_ports(2)
    source = Template(Path(__file__).with_name("application.yaml").read_text("utf-8"))
    text = source.substitute(target=target, drafter=drafter, http_port=http, grpc_port=grpc)
    return dict(yaml.safe_load(text))
