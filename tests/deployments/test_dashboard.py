"""What Ray's dashboard and its metrics agent know of the application."""

import re

import httpx

from cluster.metrics import STEP_TIME
from tests.deployments.conftest import APPLICATION, Served, wait_until


def test_the_dashboard_lists_deployments_and_replicas(served: Served):
    answer = httpx.get(f"{served.dashboard}/api/serve/applications/", timeout=60).json()
    application = answer["applications"][APPLICATION]
    assert application["status"] == "RUNNING"
    deployments = application["deployments"]
    assert set(deployments) == {
        "ingress",
        "coordinator",
        "target",
        "drafter-lm",
        "drafter-lookup",
        "drafter-ngram",
    }
    counts = {name: len(one["replicas"]) for name, one in deployments.items()}
    assert counts.pop("ingress") == 2
    assert set(counts.values()) == {1}


def test_our_metrics_reach_rays_metrics_agent(served: Served):
    import ray

    body = {"prompt": "abc abc abc", "max_tokens": 64, "ignore_eos": True}
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = (
        "ray_drafthouse_draft_tokens_total",
        "ray_vllm_spec_decode_num_draft_tokens_total",
        "ray_vllm_request_queue_time_seconds_bucket",
        "ray_drafthouse_output_tokens_total",
        "ray_drafthouse_kv_pages",
        "ray_drafthouse_target_step_seconds_count",
        "ray_drafthouse_target_step_seconds_sum",
        "ray_drafthouse_target_step_seconds_bucket",
    )

    def exported() -> bool:
        # Drafters run at the lowest priority: on a busy machine a short request may end without
        # a single draft, so there is a request before every look.
        served.api.ask("/v1/completions", **body)
        text = httpx.get(url, timeout=60).text
        return all(f"\n{name}{{" in text for name in wanted) and is_joined(text)

    wait_until(exported)
    buckets = {}
    for line in httpx.get(url, timeout=60).text.splitlines():
        bound = re.search(r'^ray_drafthouse_target_step_seconds_bucket\{.*le="([^"]+)"', line)
        if bound is not None:
            buckets[bound.group(1)] = float(line.rpartition(" ")[2])
    assert set(buckets) == {*map(str, STEP_TIME.buckets), "+Inf"}
    counts = [buckets[bound] for bound in sorted(buckets, key=float)]
    assert counts == sorted(counts), "they are cumulative"
    assert counts[-1] > 0


def is_joined(page: str) -> bool:
    """True if the panels of Ray's own LLM dashboard have a row: they join vLLM's names, by the
    worker, with the requests that it has served as a replica."""

    def workers(series: str, label: str) -> set[str]:
        lines = [line for line in page.splitlines() if line.startswith(series) and label in line]
        return set(re.findall(r'WorkerId="(\w+)"', "\n".join(lines)))

    counted = workers("ray_serve_deployment_request_counter_total{", 'deployment="')
    series = ("ray_vllm_generation_tokens_total{", "ray_vllm_num_requests_running{")
    return all(workers(each, "") & counted for each in series)


def test_every_scrape_has_the_series_of_every_process_whichever_answers(served: Served):
    for _ in range(3):  # two of them are refused by one ingress, or one by each
        served.api.refusal("/v1/completions", model="other")
    rejected = "drafthouse_rejected_requests_total"
    before = {}
    for _ in range(12):
        text = httpx.get(f"{served.http}/metrics", timeout=60).text
        series = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        values = {name: float(value) for name, value in series.items()}
        processes = set(re.findall(r'process="([a-z]+)-', text))
        assert processes == {"ingress", "coordinator", "target"}
        assert set(values) >= set(before), "no series comes and goes"
        for name, value in values.items():
            if name.split("{")[0].endswith(("_total", "_count", "_bucket")):
                assert value >= before.get(name, 0.0)
        before = values
    assert sum(v for name, v in before.items() if name.startswith(rejected)) >= 3
    assert len({name for name in before if name.startswith(rejected)}) >= 1
    missing = [v for name, v in before.items() if name.startswith("drafthouse_missing_processes")]
    assert missing == [0.0, 0.0]
