"""Compares a draft model of another vocabulary with transformers' assisted generation.

    python -m benchmarks.drafting.assistants --config configs/local.yaml --model models/demo-draft

One stream, greedy, held-out Python that the target continues.  transformers has the same draft
model by `assistant_model` and `assistant_tokenizer`, with its default settings; ours is the only
drafter of the configuration.  Tokens per pass count the target's forwards, so they depend on no
machine's speed; tokens/s do.

Bar: at least the tokens/s of transformers.  Exit status 1 if missed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.drafting.vocabularies import with_models
from benchmarks.support.options import parser_of
from benchmarks.support.prompts import heldout
from benchmarks.support.record import OUT, show_report
from cluster.config.file import load
from cluster.config.schema import Config
from cluster.core import SamplingParams
from cluster.local import LLM
from cluster.models.fingerprint import load_pretrained_tokenizer
from cluster.models.resolve import resolve

_THEIRS, _OURS = "transformers, assistant_tokenizer", "ours, vocabulary: intersection"


def by_transformers(
    target: Path, draft: Path | None, prompts: Sequence[Sequence[int]], max_tokens: int
) -> dict[str, float]:
    """Tokens per pass of the target, and tokens/s; without a draft model plain decoding."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    extra: dict[str, Any] = {}
    if draft is not None:
        extra = {
            "assistant_model": AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32),
            "tokenizer": load_pretrained_tokenizer(target),
            "assistant_tokenizer": load_pretrained_tokenizer(draft),
        }
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    model.register_forward_hook(count)
    num_tokens, start = 0, time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens,
            **extra,
        )  # fmt: skip
        num_tokens += found.shape[1] - len(prompt)
    taken = time.perf_counter() - start
    return {"tokens per pass": round(num_tokens / passes, 3), "tokens/s": num_tokens / taken}


def by_ours(config: Config, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, float]:
    """The same of the configuration's target and drafters."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    num_tokens = passes = 0
    with LLM(config) as llm:
        llm.generate([list(prompts[0])], replace(params, max_tokens=8), ignore_eos=True)
        start = time.perf_counter()
        for prompt in prompts:
            (found,) = llm.generate([list(prompt)], params, ignore_eos=True)
            num_tokens += len(found.token_ids)
            passes += found.stats.num_steps
        taken = time.perf_counter() - start
    return {"tokens per pass": round(num_tokens / passes, 3), "tokens/s": num_tokens / taken}


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--config", type=Path, required=True)
    add("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    add("--model", type=Path, required=True, help="a draft model with a tokenizer of its own")
    add("--prompts", type=int, default=4)
    add("--max-tokens", type=int, default=64)
    add("--out", type=Path, default=OUT / "drafting" / "assistants.json")
    arguments = parser.parse_args(words)
    config = load(arguments.config, arguments.overrides).config
    target = resolve(config.target.engine.model)
    texts = heldout("code", arguments.prompts, load_pretrained_tokenizer(target), 40, 200)
    drafted = with_models(config, {"other": arguments.model})
    drafted = replace(drafted, drafters={"other": drafted.drafters["other"]})
    count = arguments.max_tokens
    found = {
        "transformers": by_transformers(target, None, texts, count),
        _THEIRS: by_transformers(target, arguments.model, texts, count),
        "ours, plain": by_ours(replace(config, drafters={}, tasks={}), texts, count),
        _OURS: by_ours(drafted, texts, count),
    }
    settings = {
        "target": config.target.engine.model, "draft model": str(arguments.model),
        "prompts": arguments.prompts, "max_tokens": count,
    }  # fmt: skip
    show_report(arguments.out, {"settings": settings, "ways": found})
    return int(found[_OURS]["tokens/s"] < found[_THEIRS]["tokens/s"])


if __name__ == "__main__":
    sys.exit(main())
