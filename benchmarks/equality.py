"""Checks over HTTP, on held-out prompts, that speculative decoding never changes the text.

    python -m benchmarks.equality greedy     the server against transformers' `generate`
    python -m benchmarks.equality sampled    the server with speculation on, off, each drafter alone

Both use float32 (`--set target.engine.dtype=float32` is added): in bfloat16, kernels with different
rounding may flip near-ties, which does not concern speculative decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.serving import (
    ROOT,
    Server,
    add_server_options,
    heldout,
    running,
    write_report,
)

LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.0": {"temperature": 1.0},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {
        "temperature": 0.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
    },
    "logit_bias": {"temperature": 0.8, "logit_bias": {"200": 4.0, "300": -100.0, "264": 2.5}},
}


async def complete(
    server: Server, bodies: Sequence[Mapping[str, Any]], concurrency: int
) -> list[dict[str, Any]]:
    """Send `bodies`, at most `concurrency` at a time; returns the answers in order."""
    gate = asyncio.Semaphore(concurrency)
    async with server.client() as client:

        async def one(body: Mapping[str, Any]) -> dict[str, Any]:
            async with gate:
                response = await client.post("/v1/completions", json=dict(body))
            if response.status_code != 200:
                raise SystemExit(f"HTTP {response.status_code}: {response.text[:500]}")
            return dict(response.json())

        return list(await asyncio.gather(*(one(body) for body in bodies)))


def token_ids(answer: Mapping[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def body_of(model: str, prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "return_token_ids": True,
        **more,
    }


def reference(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """transformers' greedy text, one prompt at a time."""
    import torch

    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            text = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
        outputs.append(text[0, len(prompt) :].tolist())
    return outputs


def strip_end(ids: list[int], end_ids: Sequence[int]) -> list[int]:
    """Remove the end-of-sequence token, which the server does not count as text."""
    return ids[:-1] if ids and ids[-1] in end_ids else ids


def greedy(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    half = arguments.prompts // 2
    prompts = heldout("code", half, tokenizer, 5, 1500)
    prompts += heldout("prose", arguments.prompts - half, tokenizer, 5, 1500)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    end_ids = model.generation_config.eos_token_id
    end_ids = end_ids if isinstance(end_ids, list) else [end_ids]
    expected = [strip_end(ids, end_ids) for ids in reference(model, prompts, arguments.max_tokens)]
    report: dict[str, Any] = {"prompts": len(prompts), "max_tokens": arguments.max_tokens}
    for concurrency in (1, 16):
        bodies = [
            body_of(arguments.name, prompt, arguments.max_tokens, temperature=0.0)
            for prompt in prompts
        ]
        start = time.perf_counter()
        answers = asyncio.run(complete(server, bodies, concurrency))
        elapsed = time.perf_counter() - start
        produced = [strip_end(token_ids(answer), end_ids) for answer in answers]
        differing = [i for i, (a, b) in enumerate(zip(produced, expected, strict=True)) if a != b]
        report[f"concurrency {concurrency}"] = {
            "equal": len(prompts) - len(differing),
            "of": len(prompts),
            "differing prompts": differing,
            "mean acceptance length": acceptance(answers),
            "seconds": round(elapsed, 1),
        }
    return report


def acceptance(answers: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens per step that verified drafts; None if there was none."""
    stats = [answer["metrics"]["speculative_decoding"] for answer in answers]
    steps = sum(stat["num_spec_steps"] for stat in stats)
    accepted = sum(stat["num_accepted_draft_tokens"] for stat in stats)
    return round(1 + accepted / steps, 3) if steps else None


def sampled(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from cluster.config_file import load

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    half = arguments.prompts // 2
    prompts = heldout("code", half, tokenizer, 5, 300)
    prompts += heldout("prose", arguments.prompts - half, tokenizer, 5, 300)
    drafters = list(load(ROOT / arguments.config).config.drafters)
    modes: dict[str, dict[str, Any]] = {"off": {"enabled": False}, "on": {"enabled": True}}
    modes |= {f"only {name}": {"drafters": [name]} for name in drafters}
    report: dict[str, Any] = {"prompts": len(prompts), "max_tokens": arguments.max_tokens}
    for law, parameters in LAWS.items():
        if arguments.laws and law not in arguments.laws:
            continue
        texts: dict[str, list[list[int]]] = {}
        row: dict[str, Any] = {}
        for mode, speculation in modes.items():
            bodies = [
                body_of(
                    arguments.name,
                    prompt,
                    arguments.max_tokens,
                    seed=1000 + i,
                    speculation=speculation,
                    **parameters,
                )
                for i, prompt in enumerate(prompts)
            ]
            answers = asyncio.run(complete(server, bodies, 16))
            texts[mode] = [token_ids(answer) for answer in answers]
            equal = sum(a == b for a, b in zip(texts[mode], texts["off"], strict=True))
            row[mode] = {"equal to off": equal, "mean acceptance length": acceptance(answers)}
        report[law] = row
        print(law, row, flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["greedy", "sampled"])
    parser.add_argument("--laws", nargs="*", help="of `sampled`; default: all", choices=LAWS)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--model", default=str(ROOT / "models" / "demo-target"))
    parser.add_argument("--name", default="drafthouse-demo")
    add_server_options(parser)
    arguments = parser.parse_args()
    overrides = ["target.engine.dtype=float32", *arguments.overrides]
    with running(arguments.config, overrides, arguments.url) as server:
        measure = greedy if arguments.what == "greedy" else sampled
        write_report(f"equality-{arguments.what}", measure(server, arguments))


if __name__ == "__main__":
    main()
