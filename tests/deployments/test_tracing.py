"""Spans of requests: in the client's own trace, with steps as events, and without any text."""

import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from deployments.ingress.tracing import provider_of
from tests.conftest import python
from tests.support.deployments.place import place
from tests.support.errors import config_error

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_of_the_clients_trace(stream: bool):
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    async with place() as here:
        here.ingress.tracing = provider
        body = {"prompt": "a secret", "max_tokens": 5, "stream": stream, "ignore_eos": True}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = await here.ask("/v1/completions", headers=headers, **body)
        assert answer.status_code == 200
    (span,) = kept.get_finished_spans()
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    told = dict(span.attributes or {})
    assert {event.name for event in span.events} == {"step"}
    counts = [int((event.attributes or {})["num_tokens"]) for event in span.events]
    assert sum(counts) == told["gen_ai.usage.completion_tokens"] == 5
    assert told["gen_ai.response.model"] == "toy"
    assert "gen_ai.latency.e2e" in told
    assert "secret" not in span.to_json()


def test_without_the_key_nothing_of_it_is_imported():
    code = (
        "import sys, deployments.ingress.tracing; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert python("-c", code).returncode == 0


def test_without_the_extra_the_key_is_an_error_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
):
    exporter = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, exporter, None)
    with config_error(r"ingress.traces_url: .*drafthouse\[otel\]"):
        provider_of("http://127.0.0.1:4318/v1/traces")
