"""Who runs where: the options we give Serve, and a large cluster's placement on logical devices."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config.file import load
from cluster.config.schema import HttpConfig, PlacementConfig
from deployments.placement import Placed, local_labels, total_resources
from tests.deployments.conftest import DEADLINE_S, free_ports, places
from tests.support.choices import by_night
from tests.support.errors import config_error


def test_a_target_reserves_for_all_its_ranks_on_one_node():
    placement = PlacementConfig(
        num_cpus=2, num_gpus=0.9, resources={"target_slot": 1}, labels={"group": "target"}
    )
    assert Placed("target.placement", placement, 2, 4).options() == {
        "num_replicas": 2,
        "ray_actor_options": {
            "num_cpus": 8,
            "num_gpus": 4,  # Ray gives parts of one alone
            "resources": {"target_slot": 4},
            "label_selector": {"group": "target"},
        },
        "max_surge_percent": 0,
    }
    assert Placed("", replace(placement, num_gpus=0.4), 1, 2).reserves["GPU"] == 0.8


def test_a_drafter_asks_for_its_labels_and_surges_where_no_gpu_is_needed_for_it():
    options = Placed("", PlacementConfig(num_gpus=1, labels={"group": "draft"}), 1).options()
    assert options["ray_actor_options"]["label_selector"] == {"group": "draft"}
    assert options["max_surge_percent"] == 0
    for key, percent in (("drafters.lm.placement", 100), ("target.placement", 0)):
        assert Placed(key, PlacementConfig(), 1).options()["max_surge_percent"] == percent


def test_resources_are_summed_over_replicas_and_ranks():
    config = load("configs/llama-70b-8xh100.yaml").config
    total = total_resources(config)
    assert total["GPU"] == 8  # four ranks, two small drafters, two larger ones
    # What `ray start` is given in the file's first lines.
    assert total["target_slot"] <= 4
    assert total["draft_slot"] <= 4
    assert total["target_slot"] == 4


def test_one_machine_cannot_carry_two_values_of_a_label():
    config = load("configs/two-node.yaml").config
    with config_error("--address"):
        local_labels(config)


def with_model(arguments: Mapping[str, Any], model: str) -> dict[str, Any]:
    """A config file's `args` with every model replaced by `model`, on CPU; placement unchanged."""
    tiny = {
        "model": model,
        "device": "cpu",
        "dtype": "float32",
        "device_map": None,
        "quantization": None,
        "num_pages": 64,
        "max_context_len": 0,
        "threads": 1,
    }
    rehearsed = copy.deepcopy(dict(arguments))
    rehearsed["target"]["engine"] |= tiny
    for drafter in rehearsed.get("drafters", {}).values():
        options = drafter.get("options", {})
        if "engine" in options:
            options["engine"] |= tiny
    return rehearsed


@pytest.fixture
def rehearsed(ray_session: None, served: Any, checkpoint_factory: Callable[..., Path]) -> Any:
    """The 8-GPU configuration with tiny models, beside the application of the other tests."""
    from ray import serve

    from deployments.app import build

    file = load("configs/llama-70b-8xh100.yaml")
    model, (http, grpc) = checkpoint_factory("llama", num_key_value_heads=4), free_ports(2)
    arguments = with_model(file.document["applications"][0]["args"], str(model))
    arguments["http"], arguments["grpc"] = {"port": http}, {"port": grpc}
    arguments["ingress"]["replicas"] = 1  # it has no say in who gets which device
    serve.run(build(arguments), name="rehearsal", route_prefix="/rehearsal")
    yield replace(file.config, http=HttpConfig(port=http))
    serve.delete("rehearsal")


@by_night
def test_target_ranks_and_drafters_of_the_8_gpu_configuration_share_no_device(
    rehearsed: Any, served: Any
):
    ranks = places("target", "rehearsal")
    assert len(ranks) == 4
    target_gpus = ranks[0]["gpu_ids"]
    # A rank's own GPU is the one in its place.
    assert {rank["visible_gpus"] for rank in ranks} == {",".join(target_gpus)}
    assert len({rank["pid"] for rank in ranks}) == 4
    for rank in ranks[1:]:
        seen = Path(f"/proc/{rank['pid']}/environ").read_text().split("\0")
        assert f"CUDA_VISIBLE_DEVICES={','.join(target_gpus)}" in seen
    drafters = [
        place for name in ("drafter-lm", "drafter-large") for place in places(name, "rehearsal")
    ]
    drafter_gpus = [gpu for place in drafters for gpu in place["gpu_ids"]]
    assert len(set(target_gpus)) == len(target_gpus) == 4
    assert len(set(drafter_gpus)) == len(drafter_gpus) == 4
    assert not set(target_gpus) & set(drafter_gpus)
    assert all("target_slot" in rank["resources"] for rank in ranks)
    assert all("draft_slot" in place["resources"] for place in drafters)
    import httpx

    body = {"model": rehearsed.model_name, "prompt": "hello", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(
        f"http://127.0.0.1:{rehearsed.http.port}/v1/completions", json=body, timeout=DEADLINE_S
    ).json()
    assert answer["usage"]["completion_tokens"] > 0
