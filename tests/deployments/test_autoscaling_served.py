"""A pool of drafters on a real Serve follows the load, and the controller's log says why."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from cluster.config.applications import POLICY, drafter_deployment
from tests.deployments.conftest import Served, arguments, wait_until
from tests.support.choices import by_night
from tests.support.deployments.api import MODEL

APPLICATION = "scaled"
NAME = "ngram"
NUM_TEXTS = 6
DOWN_S = 3
# Serve's defaults would take a minute to see the load and ten to forget it.
SCALED = {
    "min_replicas": 1,
    "max_replicas": 3,
    "upscale_delay_s": 1,
    "downscale_delay_s": DOWN_S,
    "look_back_period_s": 5,
    "metrics_interval_s": 1,
    "policy": {"policy_function": POLICY},
}


@dataclass
class Readers:
    """Texts that are asked for again and again until the load is over."""

    url: str
    is_over: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, count: int) -> None:
        self.threads = [threading.Thread(target=self._read) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join()

    def _read(self) -> None:
        body = {
            "model": MODEL,
            "prompt": [9, 8, 7, 6, 5] * 8,
            "max_tokens": 2000,
            "stream": True,
            "ignore_eos": True,
        }
        while not self.is_over.is_set():
            with httpx.stream("POST", f"{self.url}/completions", json=body, timeout=120) as answer:
                for _ in answer.iter_lines():
                    if self.is_over.is_set():
                        return


@pytest.fixture
def readers(served: Served, long_folder: Path, long_draft_folder: Path) -> Iterator[Readers]:
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    settings = arguments(long_folder, long_draft_folder)
    settings["drafters"] = {
        NAME: {"kind": "ngram_cache", "max_requests": 2, "placement": {"num_cpus": 0.1}}
    }
    settings["ingress"]["replicas"] = 1
    application = {
        "name": APPLICATION,
        "import_path": "deployments.app:build",
        "route_prefix": f"/{APPLICATION}",
        "args": settings,
        "deployments": [{"name": drafter_deployment(NAME), "autoscaling_config": SCALED}],
        "runtime_env": {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}},
    }
    schema = ServeDeploySchema.model_validate({"applications": [application]})
    _get_global_client().deploy_apps(schema)
    wait_until(lambda: num_running() == 1)
    found = Readers(f"http://127.0.0.1:{settings['http']['port']}/v1")
    wait_until(lambda: is_served(found.url))
    yield found
    found.stop()
    serve.delete(APPLICATION)


def is_served(url: str) -> bool:
    try:
        return httpx.get(f"{url}/models", timeout=30).is_success
    except httpx.TransportError:
        return False


def num_running() -> int:
    from ray import serve

    application = serve.status().applications.get(APPLICATION)
    deployment = application and application.deployments.get(drafter_deployment(NAME))
    return deployment.replica_states.get("RUNNING", 0) if deployment else 0


def controller_log() -> str:
    from ray._private.worker import _global_node

    logs = Path(_global_node.get_logs_dir_path()) / "serve"
    return "".join(file.read_text("utf-8") for file in logs.glob("controller_*.log"))


@by_night
def test_a_pool_grows_under_load_and_shrinks_when_it_is_over(readers: Readers):
    readers.start(NUM_TEXTS)
    wait_until(lambda: num_running() == 3)
    readers.stop()
    wait_until(lambda: num_running() == 1)
    name = f"replicas of {drafter_deployment(NAME)}"
    log = controller_log()
    assert f"{name}: 1 -> 3: 2 texts in 2 places, 4 waiting" in log
    assert f"{name}: 3 -> 2: 0 texts in 6 places, 0 waiting" in log
