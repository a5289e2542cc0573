"""What a scrape says of several processes, without Ray."""

from prometheus_client.parser import text_string_to_metric_families

from cluster.errors import WorkerError
from cluster.metrics import OUTPUT_TOKENS, REJECTED, RUNNING, TTFT
from cluster.metrics.recorder import INGRESS, Recorder
from deployments.ingress.metrics_page import metrics_page, nobody

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Coordinator:
    """A link that answers, or breaks."""

    def __init__(self, name: str) -> None:
        self.recorder = Recorder(name)
        self.is_reachable = True

    async def metrics(self, timeout_s: float) -> bytes:
        if not self.is_reachable:
            raise WorkerError("no answer in time")
        return self.recorder.render()


def read(page: bytes) -> Series:
    """Every sample, each of which must be there once."""
    found: Series = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(series: Series, name: str, **labels: str) -> float | None:
    return series.get((name, frozenset(labels.items())))


async def test_series_of_several_processes_stand_side_by_side():
    first, second = Coordinator("c-1"), Coordinator("c-2")
    first.recorder.add(OUTPUT_TOKENS, 5.0, task="code", segment="app")
    second.recorder.add(OUTPUT_TOKENS, 7.0, task="code", segment="app")
    first.recorder.observe(TTFT, 0.2, task="code")
    own = Recorder("i-1", only=INGRESS)
    own.add(REJECTED, code="x")
    page = await metrics_page(own, {"a": first, "b": second}, nobody, 0)
    series = read(page)
    tokens = "drafthouse_output_tokens_total"
    assert value(series, tokens, task="code", segment="app", process="c-1") == 5.0
    assert value(series, tokens, task="code", segment="app", process="c-2") == 7.0
    assert value(series, "drafthouse_rejected_requests_total", code="x", process="i-1") == 1.0
    ttft = "drafthouse_time_to_first_token_seconds_bucket"
    assert value(series, ttft, task="code", le="0.25", process="c-1") == 1.0
    text = page.decode()
    assert text.count("# TYPE drafthouse_output_tokens_total ") == 1


async def test_what_an_ingress_never_records_is_not_shown_as_zero():
    page = await metrics_page(Recorder("i-1", only=INGRESS), {}, nobody, 0)
    assert RUNNING.name not in page.decode()


async def test_a_process_that_does_not_answer_is_absent_and_counted():
    slow, quick = Coordinator("c-1"), Coordinator("c-2")
    for one in (slow, quick):
        one.recorder.add(OUTPUT_TOKENS, 5.0, task="code", segment="app")
    links, own = {"a": slow, "b": quick}, Recorder("i-1", only=INGRESS)
    whole = read(await metrics_page(own, links, nobody, 0))
    slow.is_reachable = False
    partial = read(await metrics_page(own, links, nobody, 1))
    for key, counted in partial.items():
        if key[0] != "drafthouse_missing_processes":
            assert whole[key] == counted, "what is there is what it was"
    tokens = "drafthouse_output_tokens_total"
    assert value(partial, tokens, task="code", segment="app", process="c-1") is None
    assert value(whole, "drafthouse_missing_processes", role="coordinator") == 0.0
    assert value(partial, "drafthouse_missing_processes", role="coordinator") == 1.0
    assert value(partial, "drafthouse_missing_processes", role="ingress") == 1.0
