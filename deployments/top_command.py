"""`drafthouse top`: a server's figures live, by vLLM's names, so that it reads vLLM's too."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import httpx

from cluster.errors import WorkerError
from deployments.metrics_reader import Page, speculation
from deployments.openai_client import OpenAIServer

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_cache_usage": "vllm:kv_cache_usage_perc",
}
_RATES = {
    "requests_per_s": "vllm:request_success_total",
    "prompt_tokens_per_s": "vllm:prompt_tokens_total",
    "output_tokens_per_s": "vllm:generation_tokens_total",
    "preemptions_per_s": "vllm:num_preemptions_total",
}
_LATENCIES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
    "queue": "vllm:request_queue_time_seconds",
}
_DRAFTS = ("draft_tokens_per_s", "acceptance_rate", "mean_acceptance_length")
_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
# Ours alone counts by drafter what was drafted, and what of it was accepted.
_BY_DRAFTER = ("drafthouse_draft_tokens_total", "drafthouse_accepted_draft_tokens_total")


def run(arguments: argparse.Namespace) -> int:
    """Watch until Ctrl-C, or once."""
    return asyncio.run(top(arguments))


async def top(
    arguments: argparse.Namespace, transport: httpx.AsyncBaseTransport | None = None
) -> int:
    """Show figures after every interval; transport: None = the network."""
    async with OpenAIServer(arguments.url, arguments.api_key, transport) as server:
        pages = deque([await _page(server)])
        shown = (
            nullcontext(lambda found: _write(json.dumps(found) + "\n"))
            if arguments.json
            else _screen(server.base, is_live=not arguments.once)
        )
        with shown as show:
            while True:
                await asyncio.sleep(arguments.interval)
                pages.append(await _page(server))
                show(view(pages[0], pages[-1]))
                if arguments.once:
                    return 0
                while len(pages) > 2 and pages[-1].at_s - pages[1].at_s >= arguments.window:
                    pages.popleft()


async def _page(server: OpenAIServer) -> Page:
    """Raises WorkerError where there is no page, or one without vLLM's names."""
    text = await server.metrics()
    if text is None:
        raise WorkerError(f"{server.base}/metrics does not answer; is the server up?")
    page = Page({})
    with suppress(ValueError):  # it may be HTML
        page = Page.read(text, asyncio.get_running_loop().time())
    if _GAUGES["running"] not in page.samples:
        raise WorkerError(
            f"{server.base}/metrics has none of vLLM's names (no {_GAUGES['running']}); is this a "
            "Drafthouse or a vLLM, and does its coordinator answer (/health)?"
        )
    return page


def view(before: Page, page: Page) -> dict[str, Any]:
    """The figures between two pages of one server.

    Latencies are those of what ended meanwhile, or of all since the server's start ("since") where
    nothing did.  None = the server does not say.
    """
    counted = page.since(before)
    found: dict[str, Any] = {
        "model": ", ".join(sorted(page.by(_GAUGES["running"], "model_name"))) or None,
        "seconds": counted.at_s,
    }
    found |= {key: page.total(name) for key, name in _GAUGES.items()}
    if found["kv_cache_usage"] is not None:  # a share of each engine's own cache
        found["kv_cache_usage"] /= len(page.samples[_GAUGES["kv_cache_usage"]])
    for key, name in _RATES.items():
        count = counted.total(name)
        found[key] = None if count is None else count / counted.at_s
    hits, queries = (
        counted.total(f"vllm:prefix_cache_{each}_total") for each in ("hits", "queries")
    )
    found["prefix_cache_hit_rate"] = hits / queries if hits is not None and queries else None
    found["speculation"] = _speculation(counted)
    found["latency_ms"] = {key: _latency(name, counted, page) for key, name in _LATENCIES.items()}
    return found


def _speculation(counted: Page) -> dict[str, Any] | None:
    found = speculation([counted])
    if found is None:
        return None
    drafted, accepted = (counted.by(name, "drafter") for name in _BY_DRAFTER)
    return {
        "draft_tokens_per_s": found.num_draft_tokens / counted.at_s,
        "acceptance_rate": found.acceptance_rate,
        "mean_acceptance_length": found.mean_acceptance_length,
        "acceptance_by_position": list(found.accepted_per_position),
        "drafters": {
            name: {
                "draft_tokens_per_s": count / counted.at_s,
                "acceptance_rate": accepted.get(name, 0.0) / count,
            }
            for name, count in drafted.items()
            if count
        },
    }


def _latency(name: str, counted: Page, page: Page) -> dict[str, Any] | None:
    for since, each in (("window", counted), ("start", page)):
        values = {key: each.quantile(name, share) for key, share in _SHARES.items()}
        if None not in values.values():
            return {**{key: 1e3 * (value or 0.0) for key, value in values.items()}, "since": since}
    return None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def _screen(base: str, *, is_live: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yields what shows figures as tables, by rich: in one place while they are live."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    # Where nothing can be drawn over, the next figures stand below.
    is_live = is_live and console.is_terminal
    live = Live(console=console, auto_refresh=False) if is_live else None

    def show(found: Mapping[str, Any]) -> None:
        drawn = tables(found, f"{found['model']} at {base}, {time.strftime('%H:%M:%S')}")
        if live is not None:
            live.update(drawn, refresh=True)
            return
        # rich would end the process where nobody reads.
        with console.capture() as text:
            console.print(drawn)
        _write(text.get())

    with live or nullcontext():
        yield show


def tables(found: Mapping[str, Any], title: str) -> Group:
    """The figures as tables of rich."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    drafts = found["speculation"] or {}
    now = {name: found[name] for name in (*_GAUGES, *_RATES, "prefix_cache_hit_rate")}
    if drafts:
        now |= {name: drafts[name] for name in _DRAFTS}
        now["by_position"] = " ".join(f"{share:.0%}" for share in drafts["acceptance_by_position"])
    named = {
        name.replace("_per_s", "/s").replace("_", " "): {name: value} for name, value in now.items()
    }
    latencies = {name: values for name, values in found["latency_ms"].items() if values}
    beside = [
        _table(head, figures)
        for head, figures in (
            (("ms", *_SHARES, "since"), latencies),
            (("drafter", "draft tokens/s", "accepted"), drafts.get("drafters")),
        )
        if figures
    ]
    # Side by side they fit a terminal of 24 lines.
    grid = Table.grid()
    grid.add_row(_table(("", "now"), named), Group(*beside))
    return Group(Text(title, style="bold"), grid)


def _table(head: Sequence[str], figures: Mapping[str, Mapping[str, Any]]) -> Table:
    """figures: of each row, in the order of `head`."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE)
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left", no_wrap=not place)
    for title, row in figures.items():
        table.add_row(title, *(_shown(name, value) for name, value in row.items()))
    return table


def _shown(name: str, value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "-"
    if name.endswith(("_rate", "_usage")):
        return f"{value:.0%}"
    return f"{value:,.2f}" if value < 10 and value % 1 else f"{value:,.0f}"
