"""What the served engines compute with is in /health and in /metrics."""

from __future__ import annotations

from typing import Any

from tests.deployments.conftest import DEADLINE_S, Served, wait_until


def test_health_and_metrics_say_what_each_engine_computes_with(served: Served) -> None:
    engines: list[dict[str, Any]] = []

    def are_told() -> bool:
        """By whichever ingress answers, once that has found the coordinator."""
        engines[:] = served.health()["engines"]
        return bool(engines) and all(is_in_metrics(served, each) for each in engines)

    wait_until(are_told, DEADLINE_S)
    (target,) = (each for each in engines if each["role"] == "target" and not each["name"])
    assert (target["device"], target["graphs"]) == ("cpu", "none")
    assert target["attention"] in ("native", "sdpa")
    assert target["kv_tokens"] == 1024 * 16
    assert [each["role"] for each in engines].count("drafter") <= 1  # lm, once it has loaded


def is_in_metrics(served: Served, engine: dict[str, Any]) -> bool:
    labels = {"role": engine["role"], "worker": engine["worker"], "engine": engine["name"]}
    described = {name: engine[name] for name in ("device", "attention", "graphs", "kernels")}
    return served.metric("drafthouse_engine_info", **labels, **described) == 1 and served.metric(
        "drafthouse_engine_fallbacks", **labels
    ) == len(engine["fallbacks"])
