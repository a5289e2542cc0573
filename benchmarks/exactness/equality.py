"""Checks over HTTP that speculative decoding never changes the text.

    python -m benchmarks.exactness.equality greedy     the server against transformers' `generate`
    python -m benchmarks.exactness.equality sampled    speculation on, off, each drafter alone

    python -m benchmarks.exactness.equality greedy --questions QUESTIONS.jsonl --config FILE
                                                       the same with real questions and any model

Both use float32 (`--set target.engine.dtype=float32` is added): in bfloat16, kernels with different
rounding may flip near-ties, which does not concern speculative decoding.  Drafts are verified in
every step that has some (`coordinator.budget=fixed` is added): a budget that leaves them alone
would test nothing.  Exit status 1 if a text differs or no draft was verified.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.exactness.prompts import add_prompt_options, config_of, model_folder, prompts_of
from benchmarks.support.completions import acceptance, body_of, complete, token_ids
from benchmarks.support.options import add_server_options, parser_of, words
from benchmarks.support.record import OUT, show_report
from benchmarks.support.serving import Server, running

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
_LEVELS = (1, 16)
_SAMPLED_LEN = 300  # of a held-out prompt: every law and mode asks all of them


def reference(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """transformers' greedy text, one prompt at a time."""
    import torch

    outputs = []
    for prompt in tqdm(prompts, desc="transformers", leave=False):
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


def differing(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> list[int]:
    """Indices of the texts that are not equal."""
    return [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]


def greedy(server: Server, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder(arguments)
    prompts = prompts_of(arguments, AutoTokenizer.from_pretrained(folder), sys.maxsize)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    end_ids = model.generation_config.eos_token_id
    end_ids = end_ids if isinstance(end_ids, list) else [end_ids]
    expected = [strip_end(ids, end_ids) for ids in reference(model, prompts, arguments.max_tokens)]
    report: dict[str, Any] = {}
    for level in _LEVELS:
        bodies = [
            body_of(name, prompt, arguments.max_tokens, temperature=0.0) for prompt in prompts
        ]
        start = time.perf_counter()
        answers = asyncio.run(complete(server, bodies, level, f"{level} at a time"))
        found = [strip_end(token_ids(answer), end_ids) for answer in answers]
        other = differing(found, expected)
        report[f"{level} at a time"] = {
            "equal": len(prompts) - len(other),
            "of": len(prompts),
            "differing prompts": other,
            "mean acceptance length": acceptance(answers),
            "seconds": round(time.perf_counter() - start, 1),
        }
    return report


def sampled(server: Server, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(arguments))
    prompts = prompts_of(arguments, tokenizer, _SAMPLED_LEN)
    alone = config_of(arguments).drafters if arguments.alone is None else arguments.alone
    modes: dict[str, dict[str, Any]] = {"off": {"enabled": False}, "on": {"enabled": True}}
    modes |= {f"only {drafter}": {"drafters": [drafter]} for drafter in alone}
    report: dict[str, Any] = {}
    for law in arguments.laws or LAWS:
        expected: list[list[int]] = []
        for mode, speculation in modes.items():
            bodies = [
                body_of(
                    name, prompt, arguments.max_tokens, seed=1000 + index,
                    speculation=speculation, **LAWS[law],
                )
                for index, prompt in enumerate(prompts)
            ]  # fmt: skip
            answers = asyncio.run(complete(server, bodies, max(_LEVELS), f"{law}, {mode}"))
            found = [token_ids(answer) for answer in answers]
            expected = expected or found
            other = differing(found, expected)
            report[f"{law}, {mode}"] = {
                "equal": len(prompts) - len(other),
                "of": len(prompts),
                "differing prompts": other,
                "mean acceptance length": acceptance(answers),
            }
    return report


def problems(report: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Messages for texts that differ, and for a report in which no draft was verified."""
    found = [
        f"{name}: {row['of'] - row['equal']} of {row['of']} texts differ"
        for name, row in report.items()
        if row["equal"] < row["of"]
    ]
    if not any(row["mean acceptance length"] for row in report.values()):
        found.append("no draft was verified, so nothing was tested")
    return found


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("what", choices=["greedy", "sampled"])
    add("--laws", nargs="*", help="of `sampled`; default: all", choices=LAWS)
    add("--alone", type=words, help="drafters that `sampled` uses alone; default: each; '': none")
    add("--nodes", type=int, default=8, help="draft tokens per sequence and step")
    add("--max-tokens", type=int, default=48)
    add("--out", type=Path, default=OUT / "exactness", help="folder of the report")
    add_prompt_options(parser, 100)
    add_server_options(parser)
    arguments = parser.parse_args()
    overrides = [
        "target.engine.dtype=float32", "coordinator.budget=fixed",
        f"coordinator.max_draft_tokens={arguments.nodes}", *arguments.overrides,
    ]  # fmt: skip
    with running(arguments.config, overrides, arguments.url) as server:
        name = server.model()
        rows = (greedy if arguments.what == "greedy" else sampled)(server, name, arguments)
    of = "questions" if arguments.questions else "heldout"
    show_report(
        arguments.out / f"{arguments.what}-{of}.json",
        {"model": name, "max_tokens": arguments.max_tokens, "texts": rows},
    )
    found = problems(rows)
    for line in found:
        print(f"missed: {line}", file=sys.stderr)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
