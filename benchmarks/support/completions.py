"""Asks a server for completions of token ids, and reads what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.support.serving import Server


async def complete(
    server: Server, bodies: Sequence[Mapping[str, Any]], concurrency: int, title: str | None = None
) -> list[dict[str, Any]]:
    """Send `bodies`, at most `concurrency` at a time; returns the answers in order.

    title: of a progress bar; None = no bar.
    """
    gate = asyncio.Semaphore(concurrency)
    with tqdm(total=len(bodies), desc=title, disable=title is None, leave=False) as bar:
        async with server.client() as client:

            async def one(body: Mapping[str, Any]) -> dict[str, Any]:
                async with gate:
                    response = await client.post("/v1/completions", json=dict(body))
                if response.status_code != 200:
                    raise SystemExit(f"HTTP {response.status_code}: {response.text[:500]}")
                bar.update()
                return dict(response.json())

            return list(await asyncio.gather(*(one(body) for body in bodies)))


def body_of(model: str, prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "return_token_ids": True,
        **more,
    }


def token_ids(answer: Mapping[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def acceptance(answers: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens per step that verified drafts; None if no step did, so drafts were not tested."""
    stats = [answer["metrics"]["speculative_decoding"] for answer in answers]
    steps = sum(stat["num_spec_steps"] for stat in stats)
    accepted = sum(stat["num_accepted_draft_tokens"] for stat in stats)
    return round(1 + accepted / steps, 3) if steps else None
