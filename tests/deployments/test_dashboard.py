"""What Ray's dashboard and its metrics agent know of the application."""

from __future__ import annotations

from typing import Any

import httpx

from tests.deployments.conftest import APPLICATION, MODEL, Served, wait_until


def test_the_dashboard_lists_deployments_replicas_and_placement_groups(served: Served) -> None:
    answer = httpx.get(f"{served.dashboard}/api/serve/applications/", timeout=60).json()
    application = answer["applications"][APPLICATION]
    assert application["status"] == "RUNNING"
    deployments = application["deployments"]
    assert set(deployments) == {
        "ingress", "coordinator", "target", "drafter-lm", "drafter-lookup", "drafter-ngram",
    }  # fmt: skip
    assert all(len(one["replicas"]) == 1 for one in deployments.values())
    groups = httpx.get(
        f"{served.dashboard}/api/v0/placement_groups", params={"detail": True}, timeout=60
    ).json()["data"]["result"]["result"]
    assert any(group["state"] == "CREATED" and len(group["bundles"]) == 1 for group in groups)


def test_our_metrics_reach_rays_metrics_agent(served: Served) -> None:
    import ray

    body = {"model": MODEL, "prompt": "abc abc abc", "max_tokens": 64, "ignore_eos": True}
    node: dict[str, Any] = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = (
        "ray_spec_decode_num_draft_tokens_total",
        "ray_drafthouse_output_tokens_total",
        "ray_drafthouse_kv_pages",
        "ray_drafthouse_target_step_seconds_count_total",
    )

    def exported() -> bool:
        # Drafters run at the lowest priority: on a busy machine a short request may end without
        # a single draft, so there is a request before every look.
        httpx.post(f"{served.http}/v1/completions", json=body, timeout=120).raise_for_status()
        text = httpx.get(url, timeout=60).text
        return all(f"\n{name}{{" in text for name in wanted)

    wait_until(exported)
