"""A pool of drafters on a real Serve follows the load, and the controller's log says why."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config.applications import POLICY, drafter_deployment
from tests.deployments.conftest import Served, arguments, deploy, is_served, wait_until
from tests.support.choices import by_night
from tests.support.deployments.writers import Writers

APPLICATION = "scaled"
NAME = "ngram"
NUM_TEXTS = 6
# Serve's defaults would take a minute to see the load and ten to forget it.
SCALED = {
    "min_replicas": 1,
    "max_replicas": 3,
    "upscale_delay_s": 1,
    "downscale_delay_s": 3,
    "look_back_period_s": 5,
    "metrics_interval_s": 1,
    "policy": {"policy_function": POLICY},
}


@pytest.fixture
def url(served: Served, long_folder: Path, long_draft_folder: Path) -> Iterator[str]:
    """Of an application whose pool follows the load."""
    from ray import serve

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
    deploy({"applications": [application]})
    wait_until(lambda: num_running() == 1)
    url = f"http://127.0.0.1:{settings['http']['port']}"
    wait_until(lambda: is_served(f"{url}/v1/models"))
    yield url
    serve.delete(APPLICATION)


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
def test_a_pool_grows_under_load_and_shrinks_when_it_is_over(url: str):
    with Writers([], [url], 0, NUM_TEXTS, 2000, http_timeout_s=120.0, rest_s=0.0).running():
        wait_until(lambda: num_running() == 3)
    wait_until(lambda: num_running() == 1)
    name = f"replicas of {drafter_deployment(NAME)}"
    log = controller_log()
    assert f"{name}: 1 -> 3: 2 texts in 2 places, 4 waiting" in log
    assert f"{name}: 3 -> 2: 0 texts in 6 places, 0 waiting" in log
