"""Which drafters run inside the target, and which in processes of their own."""

import os
from typing import Any

import pytest

from cluster.config.file import parse_arguments
from cluster.config.schema import Config
from cluster.errors import ConfigError, NotFoundError
from cluster.worker.cli import check_in_pool
from cluster.worker.priority import pin_to_cores
from deployments.app import build
from deployments.placement import total_resources
from deployments.plan import facts
from deployments.report import printed
from tests.conftest import python


def arguments(
    drafter: dict[str, Any], device: str = "auto", **others: dict[str, Any]
) -> dict[str, Any]:
    found = {"a": drafter, **others}
    return {
        "target": {"engine": {"model": "a/b", "device": device}},
        "drafters": {name: {"kind": "suffix", **each} for name, each in found.items()},
    }


def config(*drafter: Any, **others: Any) -> Config:
    """Of the same."""
    return parse_arguments(arguments(*drafter, **others))


def plan(config: Config) -> str:
    return printed("check", facts(config, {}, is_here=True), as_json=False)


def engine(device: str) -> dict[str, Any]:
    return {"kind": "lm", "options": {"engine": {"model": "a/d", "device": device}}}


@pytest.mark.parametrize(
    ("drafter", "device", "why"),
    [
        ({}, "auto", "inside the target, by turns with its steps (auto: "),
        ({"placement": "auto"}, "cuda", "inside the target"),
        ({"placement": {"with": "target"}}, "auto", "inside the target, by turns with its steps\n"),
        (engine("auto"), "cuda:1", "inside the target"),
        (engine("cpu"), "cpu", "inside the target"),
        (engine("cuda:1") | {"placement": {"with": "target"}}, "cuda:0", "inside the target"),
        (engine("cuda:1"), "cuda:0", "in the pool (auto: its engine is on cuda:1, the target's on"),
        ({"replicas": 2}, "auto", "in the pool (auto: it has replicas"),
        ({"nice": 19}, "auto", "in the pool (auto: it has replicas or nice"),
        ({"placement": {"num_cpus": 1}}, "auto", "in the pool, as placed"),
        ({"placement": {"cores": [1]}}, "auto", "in the pool, as placed"),
    ],
)
def test_a_drafter_is_in_one_place_and_the_plan_says_why(
    drafter: dict[str, Any], device: str, why: str
):
    checked = config(drafter, device)
    is_resident = why.startswith("inside")
    assert (checked.residents, checked.pool) == ((("a",), ()) if is_resident else ((), ("a",)))
    text = plan(checked)
    assert f"drafter a: {why}" in text
    assert ("drafter-a" in text) != is_resident


def test_a_resident_reserves_nothing_and_has_no_deployment():
    resident, pooled = config({}), config({"placement": {"num_cpus": 0.5}})
    assert total_resources(pooled)["CPU"] - total_resources(resident)["CPU"] == 0.5
    for placement, deployed in (("auto", []), ({"num_cpus": 0.5}, ["drafter-a"])):
        ingress = build(arguments({"placement": placement}))._bound_deployment
        coordinator = ingress.init_args[1]._bound_deployment
        names = [each._bound_deployment.name for each in coordinator.init_args[2]]
        assert names == deployed


def test_a_worker_by_hand_is_refused_for_a_drafter_inside_the_target():
    with pytest.raises(NotFoundError, match=r"'a' runs inside the target.*drafters\.a\.placement"):
        check_in_pool(config({}), "a")
    with pytest.raises(NotFoundError, match="no drafter is named 'b'; the pool of the file has: a"):
        check_in_pool(config({"nice": 1}), "b")


def test_a_process_is_pinned_with_all_its_threads():
    core = min(os.sched_getaffinity(0))
    script = (
        "import os, threading, time\n"
        "from cluster.worker.priority import pin_to_cores\n"
        "wait = threading.Event()\n"
        "threading.Thread(target=wait.wait, daemon=True).start()\n"
        f"pin_to_cores([{core}])\n"
        "print([sorted(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')])\n"
        "wait.set()\n"
    )
    assert python("-c", script).stdout.strip() == str([[core], [core]])


def test_a_core_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="cores: 4096 is not one of the cores that this process"):
        pin_to_cores([4096])


def test_the_plan_names_whom_a_drafter_may_come_to_replace():
    text = plan(config({}, b={"rollout": {"replaces": "a"}}))
    (line,) = [each for each in text.splitlines() if each.startswith("drafter b: ")]
    assert line.endswith("; replaces a once it drafts better")
