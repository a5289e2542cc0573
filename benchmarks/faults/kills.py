"""Kills drafters and disconnects clients during generation, and checks the effects.

    python -m benchmarks.faults.kills

Kills one drafter replica, all of them, and one while it streams, by SIGKILL; every running request
must end with the same text as without faults.  Then clients disconnect, and the time until their KV
pages and drafter state are free is measured from `/metrics`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from benchmarks.support.completions import body_of, complete, token_ids
from benchmarks.support.options import DEMO_NAME, DEMO_TARGET, add_server_options, parser_of
from benchmarks.support.record import OUT, show_report
from benchmarks.support.serving import Server, child_processes, heldout, running


def drafter_processes(server: Server) -> dict[int, str]:
    return {
        process_id: command.split()[0]
        for process_id, command in child_processes(server.process_id)
        if "ServeReplica" in command and "drafter-" in command
    }


async def kill_while_running(
    server: Server, bodies: list[dict[str, Any]], when_s: list[float], everything: bool
) -> dict[str, Any]:
    """Send `bodies` at concurrency 16; at each of `moments` kill one drafter, or all."""
    killed: list[str] = []

    async def reaper() -> None:
        for delay in when_s:
            await asyncio.sleep(delay)
            victims = drafter_processes(server)
            for process_id, name in list(victims.items())[: None if everything else 1]:
                os.kill(process_id, signal.SIGKILL)
                killed.append(name)

    answers, _ = await asyncio.gather(complete(server, bodies, 16), reaper())
    return {"killed": killed, "texts": [token_ids(answer) for answer in answers]}


async def speculation_returns(server: Server, body: dict[str, Any], patience_s: float) -> float:
    """Seconds until the replacement of every LM drafter drafts for a request again."""
    start = time.monotonic()
    while time.monotonic() - start < patience_s:
        answer = (await complete(server, [body], 1))[0]
        if answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0:
            return time.monotonic() - start
        await asyncio.sleep(0.1)
    return float("inf")


async def disconnects(server: Server, prompts: list[list[int]]) -> dict[str, Any]:
    """Drop streams after a few chunks; returns the seconds until pages and drafter state are 0."""
    async with server.client() as client:

        async def drop(prompt: list[int]) -> None:
            body = body_of(DEMO_NAME, prompt, 1500, temperature=1.0, ignore_eos=True)
            async with client.stream(
                "POST", "/v1/completions", json={**body, "stream": True}
            ) as response:
                chunks = 0
                async for _ in response.aiter_lines():
                    chunks += 1
                    if chunks == 6:
                        return

        await asyncio.gather(*(drop(prompt) for prompt in prompts))
    start = time.monotonic()
    left: dict[str, float] = {}
    while time.monotonic() - start < 15:
        left = {
            f"{name}{{{labels}}}": value
            for name, labels, value in server.metrics()
            if name in ("drafthouse_kv_pages_in_use", "drafthouse_drafter_requests") and value
        }
        if not left:
            return {
                "streams": len(prompts),
                "seconds until free": round(time.monotonic() - start, 2),
            }
        await asyncio.sleep(0.05)
    return {"streams": len(prompts), "seconds until free": None, "left": left}


async def measure(server: Server) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET)
    prompts = heldout("code", 24, tokenizer, 20, 300) + heldout("prose", 24, tokenizer, 20, 300)
    bodies = [
        body_of(DEMO_NAME, prompt, 200, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    plain = [{**body, "speculation": {"enabled": False}} for body in bodies]
    expected = [token_ids(answer) for answer in await complete(server, plain, 16)]
    report: dict[str, Any] = {"requests": len(bodies)}
    for name, when_s, everything in (
        ("one replica", [1.0], False),
        ("all replicas", [1.0], True),
        ("one after the other while streaming", [0.5, 0.5, 0.5, 0.5], False),
    ):
        result = await kill_while_running(server, bodies, when_s, everything)
        equal = sum(a == b for a, b in zip(result["texts"], expected, strict=True))
        back = await speculation_returns(server, bodies[0], 60.0)
        report[name] = {
            "killed": result["killed"],
            "equal": equal,
            "of": len(bodies),
            "speculation back after s": round(back, 2),
        }
    report["disconnect"] = await disconnects(server, prompts[:16])
    return report


def main() -> None:
    parser = parser_of(__doc__)
    add_server_options(parser)
    arguments = parser.parse_args()
    overrides = ["target.engine.dtype=float32", *arguments.overrides]
    with running(arguments.config, overrides, arguments.url) as server:
        show_report(OUT / "faults" / "kills.json", asyncio.run(measure(server)))


if __name__ == "__main__":
    main()
