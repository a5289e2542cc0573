"""`drafthouse top`: the figures of pages that a real vLLM wrote, and of our own names beside."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from cluster.errors import WorkerError
from deployments.cli import EXIT_UNREAD, parser_for
from deployments.metrics_reader import Page
from deployments.top_command import top, view
from tests.conftest import Run, command
from tests.deployments.conftest import Served
from tests.support.choices import by_day
from tests.support.deployments.api import MODEL
from tests.support.deployments.fake_http import answering
from tests.support.deployments.scripted_server import in_virtual_time

# vLLM 0.32 with its ngram drafter, after 18 requests.
VLLM = (Path(__file__).parents[1] / "support/deployments/vllm_metrics.txt").read_text()
OURS = """
drafthouse_draft_tokens_total{drafter="lm",task="code"} 40.0
drafthouse_draft_tokens_total{drafter="lm",task="prose"} 10.0
drafthouse_accepted_draft_tokens_total{drafter="lm",task="code"} 25.0
drafthouse_draft_tokens_total{drafter="idle",task="code"} 0.0
"""


def nothing_yet(page: str) -> str:
    return re.sub(r" \S+$", " 0.0", page, flags=re.MULTILINE)


def shown(pages: Sequence[str], *words: str, capsys: pytest.CaptureFixture[str]) -> str:
    left = iter(pages)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=next(left)))
    arguments = parser_for([]).parse_args(["top", "http://server", "--once", *words])
    assert in_virtual_time(top(arguments, transport)) == 0
    return capsys.readouterr().out


def test_the_figures_of_one_interval_on_vllm(capsys: pytest.CaptureFixture[str]):
    pages = (nothing_yet(VLLM), VLLM)
    found = json.loads(shown(pages, "--json", "--interval", "4", capsys=capsys))
    assert (found["model"], found["seconds"]) == ("demo-target", 4.0)
    assert (found["running"], found["waiting"], found["kv_cache_usage"]) == (0.0, 0.0, 0.0)
    assert found["requests_per_s"] == 18 / 4
    assert found["output_tokens_per_s"] == 1013 / 4
    assert found["prefix_cache_hit_rate"] == 0.0
    drafts = found["speculation"]
    assert drafts["acceptance_rate"] == 476 / 607
    assert drafts["mean_acceptance_length"] == 1 + 476 / 157
    assert drafts["acceptance_by_position"][0] == 138 / 157
    assert drafts["drafters"] == {}
    assert found["latency_ms"]["ttft"]["since"] == "window"
    assert 0.0 < found["latency_ms"]["ttft"]["p50"] < found["latency_ms"]["ttft"]["p99"]
    assert found["latency_ms"]["queue"] is None


def test_ours_counts_by_drafter_too(capsys: pytest.CaptureFixture[str]):
    found = json.loads(shown((nothing_yet(VLLM), VLLM + OURS), "--json", capsys=capsys))
    assert found["speculation"]["drafters"] == {
        "lm": {"draft_tokens_per_s": 50.0, "acceptance_rate": 0.5}
    }
    text = shown((nothing_yet(VLLM), VLLM + OURS), capsys=capsys)
    assert "demo-target at http://server" in text
    assert re.search(r"lm +50 +50%", text)
    assert re.search(r"output tokens/s +1,013", text)


def test_where_nothing_happened_latencies_are_those_since_the_start():
    found = view(Page.read(VLLM, 1.0), Page.read(VLLM, 2.0))
    assert found["speculation"] is None
    assert found["output_tokens_per_s"] == 0.0
    assert found["latency_ms"]["ttft"]["since"] == "start"
    assert found["prefix_cache_hit_rate"] is None


@pytest.mark.parametrize(
    ("share", "value"), [(0.3, 0.5), (0.6, 1.0), (0.7, 2.0), (0.8, 3.0), (0.99, 3.0)]
)
def test_quantiles_are_spread_evenly_within_a_bucket(share: float, value: float):
    # New: 12 up to 1, 4 more up to 3, and 4 beyond all bounds.
    counts = {"1.0": 12.0, "3.0": 16.0, "+Inf": 20.0}
    before, after = (
        Page.read("".join(f'h_bucket{{le="{edge}"}} {old + new}\n' for edge, new in each.items()))
        for old, each in ((7.0, dict.fromkeys(counts, 0.0)), (7.0, counts))
    )
    assert after.since(before).quantile("h", share) == pytest.approx(value)
    assert before.since(before).quantile("h", share) is None


def test_a_server_without_such_figures_is_named():
    arguments = parser_for([]).parse_args(["top", "http://server"])
    others = [(200, text, "none of vLLM's") for text in ("up 1\n", "<html>")]
    for status, text, wrong in ((404, "", "does not answer"), *others):
        transport = httpx.MockTransport(lambda _, s=status, t=text: httpx.Response(s, text=t))
        with pytest.raises(WorkerError, match=wrong):
            in_virtual_time(top(arguments, transport))


@pytest.mark.parametrize("words", by_day(["--json"], ["", "--json"]))
def test_it_ends_without_a_word_where_nobody_reads_on(words: str):
    with answering("/metrics", VLLM.encode()) as port:
        top = f"-m deployments.cli top http://127.0.0.1:{port} --interval 0.05 {words}"
        shell = f"{sys.executable} {top} | head -1; exit ${{PIPESTATUS[0]}}"
        found = command("bash", "-c", shell)
    assert (found.returncode, found.stderr) == (EXIT_UNREAD, "")
    (line,) = found.stdout.splitlines()
    assert "demo-target" in line


def test_a_real_server_of_ours_is_shown(served: Served, run: Run):
    served.api.complete(prompt="abc abc abc", max_tokens=8, ignore_eos=True)
    found = json.loads(run("top", served.http, "--once", "--json", "--interval", "0.1"))
    assert found["model"] == MODEL
    assert found["output_tokens_per_s"] is not None
    assert set(found["latency_ms"]) == {"ttft", "tpot", "itl", "e2e", "queue"}
    assert None not in found["latency_ms"].values()
