"""llama.cpp's server as a peer: `python -m benchmarks.peers.llama_peer PORT COMMAND...`.

COMMAND starts the server.  Prompts are token ids, over its own completion endpoint.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.peers.protocol import Question, Reply, redirect_stdout, serve_questions
from benchmarks.spec_bench.servers import WHOLE_LAW, served
from benchmarks.support.processes import exit_on_sigterm


async def answer(url: str, question: Question) -> Reply:
    """Continue the prompts, `concurrency` at a time."""
    gate = asyncio.Semaphore(question["concurrency"])
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one(prompt: list[int]) -> dict[str, Any]:
            async with gate:
                return await _completed(client, prompt, question)

        found = await asyncio.gather(*(one(prompt) for prompt in question["prompts"]))
    drafted, accepted, steps = (
        sum(each["drafts"].get(name, 0) for each in found)
        for name in ("draft_n", "draft_n_accepted", "steps")
    )
    answers = [
        {name: each[name] for name in ("submitted", "events", "token_ids")} for each in found
    ]
    acceptance = {"steps": steps, "drafted": drafted, "accepted": accepted} if drafted else None
    return {"answers": answers, "acceptance": acceptance}


async def _completed(
    client: httpx.AsyncClient, prompt: list[int], question: Question
) -> dict[str, Any]:
    body = {
        "prompt": prompt, "n_predict": question["max_tokens"], "ignore_eos": True, "stream": True,
        "temperature": question["temperature"], "top_p": 1.0, "return_tokens": True,
        **WHOLE_LAW,
    }  # fmt: skip
    ids: list[int] = []
    events: list[tuple[float, int]] = []
    timings: dict[str, Any] = {}
    submitted = time.perf_counter()
    async with client.stream("POST", "/completion", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            timings = chunk.get("timings") or timings
            if not chunk.get("stop") and chunk.get("tokens"):
                ids += chunk["tokens"]
                events.append((time.perf_counter(), len(ids)))
    drafts = {name: timings.get(name, 0) for name in ("draft_n", "draft_n_accepted")}
    # Every step emits what it accepts and one more.
    drafts["steps"] = max(len(ids) - drafts["draft_n_accepted"], 1)
    return {"submitted": submitted, "events": events, "token_ids": ids, "drafts": drafts}


def main() -> None:
    port, *command = sys.argv[1:]
    line = redirect_stdout()
    exit_on_sigterm()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as logs, served(command, {}, url, Path(logs) / "server.log"):
        serve_questions(line, lambda question: asyncio.run(answer(url, question)))


if __name__ == "__main__":
    main()
