"""Checks over HTTP that speculative decoding never changes the text.

    python -m benchmarks.exactness.equality greedy         against transformers' `generate`
    python -m benchmarks.exactness.equality sampled        speculation on, off, each drafter alone
    python -m benchmarks.exactness.equality reproducible   bit for bit, with `reproducible: true`

    python -m benchmarks.exactness.equality greedy --questions QUESTIONS.jsonl --config FILE
                                                           with real questions and any model

The first two use float32 (`--set target.engine.dtype=float32` is added): in bfloat16, kernels with
different rounding may flip near-ties, which does not concern speculative decoding.  Drafts are
verified in every step that has some (`coordinator.budget=fixed` is added): a budget that leaves
them alone would test nothing.

The third compares token ids and log-probabilities in bfloat16 and in float32, one request at a time
and several.  The mode's cost is the time of the same texts, one at a time, with and without it.

Exit status 1 if a text differs or no draft was verified.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from benchmarks.exactness.prompts import add_prompt_options, config_of, model_folder, prompts_of
from benchmarks.support.completions import acceptance, body_of, complete, token_ids
from benchmarks.support.options import add_options, add_server_options, parser_of, words
from benchmarks.support.record import OUT, show_report
from benchmarks.support.serving import Server, running
from cluster.records import frozen

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
# Of reproducible mode.
_DRAWN = {"temperature": 0.8}
_LEVELS = (1, 16)
_SAMPLED_LEN = 300  # of a held-out prompt: every law and mode asks all of them

Rows = dict[str, dict[str, Any]]


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


def modes_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return a request's `speculation` by the name of the mode: off, on, each drafter alone."""
    alone = config_of(arguments).drafters if arguments.alone is None else arguments.alone
    modes: dict[str, dict[str, Any]] = {"off": {"enabled": False}, "on": {"enabled": True}}
    return modes | {f"only {drafter}": {"drafters": [drafter]} for drafter in alone}


@frozen
class Asker:
    """Asks a server to continue the prompts."""

    server: Server
    prompts: Sequence[Sequence[int]]
    max_tokens: int

    def answers(self, level: int, title: str | None, **fields: Any) -> list[dict[str, Any]]:
        name = self.server.model()
        bodies = [
            body_of(name, prompt, self.max_tokens, seed=1000 + index, **fields)
            for index, prompt in enumerate(self.prompts)
        ]
        return asyncio.run(complete(self.server, bodies, level, title))

    def seconds(self, count: int = 12) -> float:
        """Median seconds of plain decoding per prompt, one at a time, with cached prompts."""
        times = []
        plain: dict[str, Any] = {**_DRAWN, "speculation": {"enabled": False}}
        for prompt in self.prompts[:count]:
            alone = Asker(self.server, [prompt], self.max_tokens)
            alone.answers(1, None, **plain)
            start = time.perf_counter()
            alone.answers(1, None, **plain)
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def row(
    found: Sequence[Any], expected: Sequence[Any], answers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    other = differing(found, expected)
    return {
        "equal": len(found) - len(other),
        "of": len(found),
        "differing prompts": other,
        "mean acceptance length": acceptance(answers),
    }


def greedy(asker: Asker, arguments: argparse.Namespace) -> Rows:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder(arguments), dtype=torch.float32)
    end_ids = model.eval().generation_config.eos_token_id
    end_ids = end_ids if isinstance(end_ids, list) else [end_ids]
    texts = reference(model, asker.prompts, arguments.max_tokens)
    expected = [strip_end(ids, end_ids) for ids in texts]
    report = {}
    for level in _LEVELS:
        start = time.perf_counter()
        answers = asker.answers(level, f"{level} at a time", **LAWS["greedy"])
        found = [strip_end(token_ids(answer), end_ids) for answer in answers]
        seconds = round(time.perf_counter() - start, 1)
        report[f"{level} at a time"] = {**row(found, expected, answers), "seconds": seconds}
    return report


def sampled(asker: Asker, arguments: argparse.Namespace) -> Rows:
    report = {}
    for law in arguments.laws or LAWS:
        expected: list[list[int]] = []
        for mode, speculation in modes_of(arguments).items():
            title = f"{law}, {mode}"
            answers = asker.answers(max(_LEVELS), title, speculation=speculation, **LAWS[law])
            found = [token_ids(answer) for answer in answers]
            expected = expected or found
            report[title] = row(found, expected, answers)
    return report


def reproducible(asker: Asker, arguments: argparse.Namespace) -> Rows:
    """Token ids, and log-probabilities as printed with full precision, in every way to serve."""
    ways = [(mode, level) for mode in ("off", "on") for level in _LEVELS]
    modes = modes_of(arguments)
    ways += [(mode, max(_LEVELS)) for mode in modes if mode.startswith("only ")]
    report, first = {}, list[Any]()
    for mode, level in ways:
        title = f"{mode}, {level} at a time"
        answers = asker.answers(level, title, logprobs=1, speculation=modes[mode], **_DRAWN)
        bits = [
            (token_ids(each), json.dumps(each["choices"][0]["logprobs"]["token_logprobs"]))
            for each in answers
        ]
        first = first or bits
        report[title] = row(bits, first, answers)
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


def measure(arguments: argparse.Namespace) -> Rows:
    """Return the rows of what is asked for; of reproducible mode, by type of numbers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(arguments))
    max_len = sys.maxsize if arguments.what == "greedy" else _SAMPLED_LEN
    prompts = prompts_of(arguments, tokenizer, max_len)
    fixed = ["coordinator.budget=fixed", f"coordinator.max_draft_tokens={arguments.nodes}"]

    @contextmanager
    def serving(dtype: str, *more: str) -> Iterator[Asker]:
        overrides = [f"target.engine.dtype={dtype}", *fixed, *more, *arguments.overrides]
        with running(arguments.config, overrides, arguments.url) as server:
            yield Asker(server, prompts, arguments.max_tokens)

    if arguments.what != "reproducible":
        with serving("float32") as asker:
            return (greedy if arguments.what == "greedy" else sampled)(asker, arguments)
    report: Rows = {}
    for dtype in ("bfloat16", "float32"):
        with serving(dtype) as asker:
            without = asker.seconds()
        with serving(dtype, "target.engine.reproducible=true") as asker:
            with_ = asker.seconds()
            rows = reproducible(asker, arguments)
        report |= {f"{dtype}, {title}": row for title, row in rows.items()}
        times = {"seconds per text without the mode": without, "with it": with_}
        report[f"{dtype}, off, 1 at a time"] |= {name: round(s, 4) for name, s in times.items()}
    return report


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("what", choices=["greedy", "sampled", "reproducible"])
    add("--laws", nargs="*", help="of `sampled`; default: all", choices=LAWS)
    add_options(
        parser,
        alone=(words, "drafters to use alone; default: each; '': none"),
        nodes=(8, "draft tokens per sequence and step"),
        max_tokens=48,
        out=(OUT / "exactness", "folder of the report"),
    )
    add_prompt_options(parser, 100)
    add_server_options(parser)
    arguments = parser.parse_args()
    if arguments.what == "reproducible" and arguments.url:
        parser.error("reproducible mode is a setting of the servers that are started: no --url")
    rows = measure(arguments)
    of = "questions" if arguments.questions else "heldout"
    settings = {"config": arguments.config, "max_tokens": arguments.max_tokens}
    show_report(arguments.out / f"{arguments.what}-{of}.json", {**settings, "texts": rows})
    found = problems(rows)
    for line in found:
        print(f"missed: {line}", file=sys.stderr)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
