"""Dashboards and alerts on a Prometheus that scrapes the application."""

import json
import math
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from k8s.tools.monitoring import DASHBOARDS, MONITORING
from tests.conftest import REPOSITORY
from tests.deployments.conftest import Served, free_port, is_served, wait_until
from tests.support.prometheus import program

ALERTS = MONITORING / "alerts.yaml"
# What Grafana would put there; every scrape of the test lies within a minute.
_FILLED_IN = {"$job": ".+", "$__rate_interval": "1m"}


@pytest.fixture(scope="module")
def prometheus(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a Prometheus that scrapes the application every second."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = config_of_the_page(served.http.removeprefix("http://"))
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), "utf-8")
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=warn",
        ]
    )
    try:
        wait_until(lambda: process.poll() is not None or is_served(f"http://{address}/-/ready"))
        assert process.poll() is None, "Prometheus has ended"
        with httpx.Client(base_url=f"http://{address}/api/v1", timeout=60) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


def config_of_the_page(address: str) -> dict[str, Any]:
    """The configuration that docs/monitoring.md shows, in a hurry."""
    page = (REPOSITORY / "docs/monitoring.md").read_text("utf-8")
    fence = re.search(r"```yaml\n# prometheus.yml\n(.*?)```", page, re.DOTALL)
    config = yaml.safe_load(fence[1].replace("HOST:8000", address))
    assert [str(REPOSITORY / path) for path in config["rule_files"]] == [str(ALERTS)]
    for scrape in config["scrape_configs"]:
        scrape["scrape_interval"] = "1s"
    return config | {"rule_files": [str(ALERTS)], "global": {"evaluation_interval": "1s"}}


def queries() -> dict[str, str]:
    """The PromQL of every panel, by dashboard, title and legend; and of the choice of jobs."""
    found = {}
    for described in DASHBOARDS:
        path = MONITORING / "dashboards" / f"{described.name}.json"
        document = json.loads(path.read_text("utf-8"))
        (jobs,) = (each for each in document["templating"]["list"] if each["name"] == "job")
        (metric,) = re.findall(r"label_values\((\w+), job\)", jobs["query"])
        found[f"{described.name}: jobs"] = f"count by (job) ({metric})"
        for panel in document["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"]
                for variable, value in _FILLED_IN.items():
                    query = query.replace(variable, value)
                found[f"{described.name}: {panel['title']}: {target['legendFormat']}"] = query
    return found


def has_data(prometheus: httpx.Client, query: str) -> bool:
    """True if the query returns a series with a number."""
    answer = prometheus.get("/query", params={"query": query}).json()
    assert answer["status"] == "success", answer
    return any(math.isfinite(float(each["value"][1])) for each in answer["data"]["result"])


def test_every_panel_shows_data(served: Served, prometheus: httpx.Client):
    empty = queries()
    assert len(empty) > 40
    body = {"prompt": "abc abc abc", "max_tokens": 128, "ignore_eos": True}

    def all_have_shown() -> bool:
        # A rate needs two scrapes and something between them.
        served.api.ask("/v1/completions", **body)
        for name in [name for name, query in empty.items() if has_data(prometheus, query)]:
            del empty[name]
        return not empty

    try:
        wait_until(all_have_shown)
    except AssertionError:
        pytest.fail(f"no data: {json.dumps(empty, indent=1)}")


def test_ray_reads_the_variables_that_the_page_names():
    from ray.dashboard.modules.metrics import metrics_head

    page = (REPOSITORY / "docs/monitoring.md").read_text("utf-8")
    named = re.findall(r"^\| `(RAY_\w+)` \|", page, re.MULTILINE)
    assert len(named) == 4
    assert set(named) <= set(map(str, vars(metrics_head).values()))
