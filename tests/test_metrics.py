import itertools
import re

import pytest

from cluster import metrics
from cluster.metrics import Metric
from cluster.metrics.recorder import EVERY_METRIC, Recorder
from tests.support.metrics import enter, page


@pytest.mark.parametrize("metric", EVERY_METRIC, ids=lambda metric: metric.name)
def test_every_metric_has_a_plain_name_a_definition_and_known_kind(metric: Metric):
    assert re.fullmatch(r"(drafthouse_|vllm:)[a-z0-9_]+", metric.name)
    # Prometheus adds _total to counters by itself.
    assert metric.kind != "counter" or not metric.name.endswith("_total")
    assert metric.help.endswith((".", ")"))
    assert metric.kind in ("counter", "gauge", "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_names_are_unique():
    assert len({metric.name for metric in EVERY_METRIC}) == len(EVERY_METRIC)


def test_times_are_in_seconds_and_say_so():
    for metric in EVERY_METRIC:
        if metric.kind == "histogram" and "second" in metric.help.lower():
            assert metric.name.endswith("_seconds")


@pytest.mark.parametrize("metric", EVERY_METRIC, ids=lambda metric: metric.name)
def test_every_metric_can_be_recorded_and_read_back(metric: Metric):
    recorder = Recorder()
    labels = {name: f"a-{name}" for name in metric.labels}
    vllms = {"model_name": "", "engine": "0"} if metric.name.startswith("vllm:") else {}
    values = [value for _, value in sorted((labels | vllms).items())]
    for number in (1.0, 2.0):
        enter(recorder, metric, number, **labels)
    wanted = {
        "counter": {"_total": 3.0},
        "gauge": {"": 2.0},
        "histogram": {"_count": 2.0, "_sum": 3.0},
    }[metric.kind]
    found = page(recorder)
    for suffix, number in wanted.items():
        assert found[" ".join((metric.name + suffix, *values))] == number


def test_a_wrong_label_is_an_error_and_not_a_new_series():
    with pytest.raises(ValueError, match="abel"):
        Recorder().add(metrics.STEPS, traget="t-1")


# What metrics can have at most, beside 32 segments and `other`, five drafters and ten tasks.
SIZES = {
    "segment": 33,
    "drafter": 5,
    "task": 10,
    "law": 2,
    "outcome": 2,
    "finish_reason": 4,
    "kind": 3,
    "key": 101,
    "why": 8,
    "code": 14,
    "part": 6,
    "position": 16,
    "worker": 6,
}


def test_there_are_at_most_five_thousand_series():
    recorder = Recorder("c-1", model_name="m")
    for metric in EVERY_METRIC:
        values = [[f"{name}-{n}" for n in range(SIZES.get(name, 1))] for name in metric.labels]
        for combination in itertools.product(*values):
            enter(recorder, metric, 1.0, **dict(zip(metric.labels, combination, strict=True)))
    lines = recorder.render().decode().splitlines()
    assert sum(not line.startswith("#") for line in lines) <= 5000
