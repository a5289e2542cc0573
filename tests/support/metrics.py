"""A recorder, filled and read by hand."""

from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics import Metric
from cluster.metrics.recorder import Recorder


def enter(recorder: Recorder, metric: Metric, value: float, **labels: str) -> None:
    kinds = {"counter": recorder.add, "gauge": recorder.set, "histogram": recorder.observe}
    kinds[metric.kind](metric, value, **labels)


def page(recorder: Recorder) -> dict[str, float]:
    """Every sample by its name and its labels' values, in the order of their names."""
    return {
        " ".join(
            (sample.name, *(value for _, value in sorted(sample.labels.items())))
        ): sample.value
        for family in text_string_to_metric_families(recorder.render().decode())
        for sample in family.samples
    }
