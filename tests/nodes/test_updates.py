"""A new release takes the place of the old one, part by part, while 32 streams are written."""

import json
import re
import shutil
import sys
import time
from pathlib import Path

import httpx
import pytest

from benchmarks.support.record import rows
from cluster.rpc import messages
from tests.deployments.conftest import wait_until
from tests.nodes.conftest import CONFIG, MODEL, Cluster, wait_until_whole
from tests.nodes.faults import ROLES
from tests.nodes.test_faults import NUM_HTTP_STREAMS, NUM_STREAMS, NUM_TOKENS, RECORD
from tests.support.deployments.metrics import metric, samples
from tests.support.deployments.writers import Writers

REPOSITORY = Path(__file__).resolve().parents[2]
# On two cores each of some ten processes starts in 80 s, one after the other.
UPDATE_S = 1200.0
REST_S = 3.0  # the new processes load on the cores that the writers would take


def next_release(folder: Path) -> dict[str, str]:
    """Copy the product as a release with a newer protocol; returns the environment that runs it."""
    for package in ("cluster", "deployments"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, folder / package, ignore=ignored)
    source = folder / "cluster" / "messages.py"
    newer = f"\nPROTOCOL_VERSION = {messages.PROTOCOL_VERSION + 1}\n"
    changed, count = re.subn(r"\nPROTOCOL_VERSION = \d+\n", newer, source.read_text())
    assert count == 1
    # A process's title overwrites what its environment was: each says itself that it runs this.
    ran = folder / "ran"
    ran.mkdir()
    says = f"import os, pathlib\npathlib.Path({str(ran)!r}, str(os.getpid())).touch()\n"
    source.write_text(f"{changed}\n{says}")
    runs = {"PYTHONPATH": str(folder)}
    return {**runs, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"env_vars": runs}})}


def pids(cluster: Cluster) -> set[int]:
    return {pid for role in ROLES for _, pid in cluster.replicas(role)}


def test_an_update_of_every_part_loses_no_text(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
):
    release = tmp_path_factory.mktemp("release")
    environment = next_release(release)
    # Nobody is silent here but for the load: on two cores ten processes start beside the texts.
    writers = Writers(
        cluster.grpc_addresses, cluster.urls, NUM_STREAMS, NUM_HTTP_STREAMS, NUM_TOKENS, 60.0
    )
    with writers.running():
        writers.wait()
        before, began = pids(cluster), time.monotonic()
        writers.longest_s, writers.rest_s = 0.0, REST_S
        cluster.serve(cluster.folder / CONFIG, environment=environment)
        while before & pids(cluster):
            assert time.monotonic() < began + UPDATE_S, cluster.health()
            time.sleep(0.2)
        took_s = time.monotonic() - began
        wait_until_whole(cluster)
    found = {
        "all parts replaced, s": round(took_s),
        "longest pause, s": round(writers.longest_s, 2),
    }
    sys.stdout.write(f"{json.dumps(found)}\n")  # pytest -rP shows it
    assert not writers.wrong, writers.wrong
    assert not writers.errors, writers.errors
    url = cluster.url()
    assert metric(url, "drafthouse_requests_total", finish_reason="error") == 0
    counted = [labels["target"] for labels, _ in samples(url, "drafthouse_target_steps_total")]
    assert len(counted) == len(set(counted)), "one coordinator counts a target's steps"
    if RECORD:
        record = json.loads(Path(RECORD).read_text())
        Path(RECORD).write_text(rows(record | {"update": found}) + "\n")
    assert pids(cluster) <= {int(each.name) for each in (release / "ran").iterdir()}


def test_the_two_node_configuration_has_the_target_on_one_node_and_the_pool_on_the_other(
    cluster: Cluster,
):
    """configs/two-node.yaml takes the place of what is served, with tiny models."""
    changed = {
        "model_name": MODEL,
        "http.port": cluster.http_port,
        "target.engine.model": cluster.target,
        "drafters.lm.options.engine.model": cluster.drafter,
    }
    for engine in ("target.engine", "drafters.lm.options.engine"):
        own = {"dtype": "float32", "device": "cpu", "threads": 1, "max_context_len": 512}
        changed |= {f"{engine}.{key}": value for key, value in own.items()}
    options = [text for key, value in changed.items() for text in ("--set", f"{key}={value}")]
    body = {"model": MODEL, "prompt": "abc 1 abc", "max_tokens": 48, "temperature": 0.7, "seed": 1}

    def answered() -> object:
        """By whichever ingress is there: none stays where it was."""
        url = f"{cluster.url()}/v1/completions"
        return httpx.post(url, json=body, timeout=60).raise_for_status().json()["choices"]

    expected = answered()
    cluster.serve(REPOSITORY / "configs" / "two-node.yaml", *options)

    def is_whole() -> bool:
        states, drafters = cluster.health(), {"lm": 1, "suffix": 1, "ngram": 1}
        seen = [state["targets"] == 1 and state["drafters"] == drafters for state in states]
        return bool(seen) and all(seen)

    wait_until(is_whole)
    of_target, of_pool, _ = cluster.nodes.nodes
    wanted = {
        role: {place.name}
        for place, roles in (
            (of_target, ("target", "coordinator", "ingress")),
            (of_pool, ("drafter-lm", "drafter-suffix", "drafter-ngram")),
        )
        for role in roles
    }

    def has_moved() -> bool:
        """Serve ends a former replica only when its successor serves."""
        return wanted == {
            role: {node.name for node, _ in cluster.replicas(role)} for role in wanted
        }

    wait_until(has_moved)
    assert answered() == expected
