"""Compares a draft model of another vocabulary with transformers' assisted generation.

    python -m benchmarks.drafting.assistants --config configs/local.yaml --model models/demo-draft

One stream, held-out Python that the target continues.  transformers has the same draft model by
`assistant_model` and `assistant_tokenizer`, with its default settings: greedily it reads drafts as
text, sampled it drafts what both vocabularies have.  Ours is the only drafter of the configuration.
Tokens per pass count the target's forwards, so they depend on no machine's speed; tokens/s do.
The log-probability is the target's own of a text's tokens, in nats: texts of one law have the same.

Bar: at least the tokens/s of transformers.  Exit status 1 if missed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.drafting.vocabularies import with_models
from benchmarks.support.options import parser_of, sampling
from benchmarks.support.prompts import heldout
from benchmarks.support.record import OUT, show_report
from cluster.config.file import load
from cluster.config.schema import Config
from cluster.core import SamplingParams
from cluster.local import LLM
from cluster.models.fingerprint import load_pretrained_tokenizer
from cluster.models.resolve import resolve

_THEIRS, _OURS = "transformers, assistant_tokenizer", "ours, vocabulary: intersection"


@dataclass(frozen=True, slots=True)
class Written:
    """The tokens behind each prompt, the target's passes for them, and the seconds."""

    texts: Sequence[Sequence[int]]
    num_passes: int
    taken_s: float


def by_transformers(
    target: Path, draft: Path | None, prompts: Sequence[Sequence[int]], law: SamplingParams
) -> Written:
    """What the target makes of the prompts; without a draft model by plain decoding."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    extra: dict[str, Any] = {"do_sample": law.temperature > 0.0}
    if law.temperature:
        extra |= {"temperature": law.temperature, "top_k": 0}
    if draft is not None:
        extra |= {
            "assistant_model": AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32),
            "tokenizer": load_pretrained_tokenizer(target),
            "assistant_tokenizer": load_pretrained_tokenizer(draft),
        }
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    def write(prompt: Sequence[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **extra
        )
        return list(found[0, len(prompt) :].tolist())

    torch.manual_seed(0)
    write(prompts[0], 8)
    model.register_forward_hook(count)
    start = time.perf_counter()
    texts = [write(prompt, law.max_tokens) for prompt in prompts]
    return Written(texts, passes, time.perf_counter() - start)


def by_ours(config: Config, prompts: Sequence[Sequence[int]], law: SamplingParams) -> Written:
    """The same of the configuration's target and drafters."""
    texts, passes = list[Sequence[int]](), 0
    with LLM(config) as llm:
        llm.generate([list(prompts[0])], replace(law, max_tokens=8), ignore_eos=True)
        start = time.perf_counter()
        for seed, prompt in enumerate(prompts):
            params = replace(law, seed=seed)
            (found,) = llm.generate([list(prompt)], params, ignore_eos=True)
            texts.append(found.token_ids)
            passes += found.stats.num_steps
        return Written(texts, passes, time.perf_counter() - start)


@torch.inference_mode()
def report(
    target: Path, prompts: Sequence[Sequence[int]], ways: Mapping[str, Written]
) -> dict[str, dict[str, float]]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    found = {}
    for name, way in ways.items():
        law = 0.0
        for prompt, text in zip(prompts, way.texts, strict=True):
            laws = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
            law += float(laws.log_softmax(-1)[torch.arange(len(text)), list(text)].sum())
        num_tokens = sum(map(len, way.texts))
        found[name] = {
            "tokens per pass": round(num_tokens / way.num_passes, 3),
            "tokens/s": round(num_tokens / way.taken_s, 1),
            "log-probability of a token": round(law / num_tokens, 2),
        }
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--config", type=Path, required=True)
    add("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    add("--model", type=Path, required=True, help="a draft model with a tokenizer of its own")
    add("--prompts", type=int, default=4)
    add("--max-tokens", type=int, default=64)
    add("--law", default="greedy", help="greedy, t0.7 ...")
    add("--out", type=Path, default=OUT / "drafting" / "assistants.json")
    arguments = parser.parse_args(words)
    config = load(arguments.config, arguments.overrides).config
    target = resolve(config.target.engine.model)
    texts = heldout("code", arguments.prompts, load_pretrained_tokenizer(target), 40, 200)
    drafted = with_models(config, {"other": arguments.model})
    drafted = replace(drafted, drafters={"other": drafted.drafters["other"]})
    law = sampling(arguments.law, arguments.max_tokens)
    ways = {
        "transformers": by_transformers(target, None, texts, law),
        _THEIRS: by_transformers(target, arguments.model, texts, law),
        "ours, plain": by_ours(replace(config, drafters={}, tasks={}), texts, law),
        _OURS: by_ours(drafted, texts, law),
    }
    found = report(target, texts, ways)
    settings = {
        "target": config.target.engine.model, "draft model": str(arguments.model),
        "prompts": arguments.prompts, "max_tokens": arguments.max_tokens, "law": arguments.law,
    }  # fmt: skip
    show_report(arguments.out, {"settings": settings, "ways": found})
    return int(found[_OURS]["tokens/s"] < found[_THEIRS]["tokens/s"])


if __name__ == "__main__":
    sys.exit(main())
