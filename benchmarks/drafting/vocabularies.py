"""Compares a draft model in the target's vocabulary with the same one under a tokenizer of its own.

    python -m benchmarks.drafting.vocabularies QUESTIONS --config configs/local.yaml
    python -m benchmarks.drafting.vocabularies QUESTIONS --config configs/local.yaml \\
        --others models/demo-draft

QUESTIONS: Spec-Bench's JSONL.  The configuration's drafter `lm` has a part of the target's
vocabulary.  Its copy has the same weights and, in place of that map, a tokenizer made of these
tokens alone: what the comparison shows is the cost of reading all other tokens as several.  That
copy is artificial: a tokenizer that was trained apart shares fewer tokens.  Then come models with
tokenizers of their own (--others), along the same texts and along held-out Python that the target
continues.

The target answers; each drafter is led along the answers in rounds, without a time limit, so tokens
per step depend on no machine's speed.  The cost is what reading takes per commit, of 1 to 4 tokens.

Bars: 0.85 of the tokens per step in the target's vocabulary, and 0.3 ms a commit.  Exit status 1 if
missed.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from benchmarks.replay.along import Recording, ReplayStats, replay
from benchmarks.replay.record import created, write_texts
from benchmarks.spec_bench import questions as spec_bench
from benchmarks.support.options import parser_of, sampling
from benchmarks.support.prompts import heldout
from benchmarks.support.record import OUT, show_report
from cluster.config.file import load
from cluster.config.schema import Config, DrafterConfig
from cluster.core import SamplingParams, token_array
from cluster.draft.lm import LMDrafter
from cluster.draft.vocabulary import FILE_NAME, load_draft_vocabulary
from cluster.local import LLM
from cluster.models.fingerprint import load_pretrained_tokenizer
from cluster.models.resolve import resolve

_LEAST_SHARE, _MOST_MS = 0.85, 0.3
_LM, _COPY = "lm", "the same, other vocabulary"


def copy_with_tokenizer(model: Path, target: Path, copy: Path) -> Path:
    """A copy of a model with a part of the target's vocabulary, whose tokenizer has only that."""
    own = load_draft_vocabulary(model)
    if own is None:
        raise SystemExit(f"{model} has no {FILE_NAME}; name a drafter with a part of a vocabulary")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns(FILE_NAME))
    tokenizer = load_pretrained_tokenizer(target)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    places = {int(theirs): ours for ours, theirs in enumerate(own.target_ids)}
    vocab = {text: places[i] for text, i in tokenizer.get_vocab().items() if i in places}
    state["model"]["vocab"] = vocab
    state["model"]["merges"] = [
        pair for pair in state["model"]["merges"] if {*pair, "".join(pair)} <= vocab.keys()
    ]
    # Of frequent tokens not all parts are frequent.
    state["model"]["ignore_merges"] = True
    state["added_tokens"] = [
        {**each, "id": places[each["id"]]} for each in state["added_tokens"] if each["id"] in places
    ]
    backend = Backend.from_str(json.dumps(state))
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=tokenizer.eos_token
    ).save_pretrained(copy)
    return copy


def with_models(config: Config, models: Mapping[str, Path]) -> Config:
    """The configuration with drafters for these models beside `lm`."""
    options = config.drafters[_LM].options
    others = {
        name: replace(
            config.drafters[_LM],
            options={**options, "engine": {**options["engine"], "model": str(model)}},
        )
        for name, model in models.items()
    }
    drafters: dict[str, DrafterConfig] = {_LM: config.drafters[_LM], **others}
    return replace(config, drafters=drafters, tasks={})


def python_texts(config: Config, count: int, law: SamplingParams) -> list[Recording]:
    """What the target makes of held-out Python."""
    tokenizer = load_pretrained_tokenizer(resolve(config.target.engine.model))
    prompts = heldout("code", count, tokenizer, 40, 200)
    params = [replace(law, seed=index) for index in range(count)]
    with LLM(replace(config, drafters={}, tasks={})) as llm:
        answers = llm.generate(prompts, params, ignore_eos=True)
    return [
        Recording(token_array(prompt), token_array(answer.token_ids), own, "python")
        for prompt, own, answer in zip(prompts, params, answers, strict=True)
    ]


def tokens_per_step(
    config: Config, name: str, texts: Sequence[Recording], nodes: int
) -> dict[str, float]:
    drafter = created(config, name, nodes)
    chat, python = ReplayStats(), ReplayStats()
    for index, text in enumerate(texts):
        stats = replay(drafter, text, nodes, request_id=str(index))
        if text.task == "python":
            python += stats
        else:
            chat += stats
    return {
        "questions": round(chat.mean_acceptance_length, 3),
        "python": round(python.mean_acceptance_length, 3),
    }


def reading_ms(config: Config, name: str, texts: Sequence[Recording]) -> dict[str, float]:
    """What it takes to read commits of 1 to 4 tokens, and prompts."""
    drafter = created(config, name, 1)
    assert isinstance(drafter, LMDrafter)
    sizes = np.random.default_rng(0).integers(1, 5, 10_000).tolist()
    commits, prompts = list[float](), list[float]()
    for text in texts:
        read, left = drafter._model.read_text(), text.output_ids
        start = time.perf_counter()
        read.append(text.prompt_ids)
        prompts.append(time.perf_counter() - start)
        while len(left):
            added, left = np.split(left, [sizes[len(commits)]])
            start = time.perf_counter()
            read.append(added)
            commits.append(time.perf_counter() - start)
    return {
        "a commit, mean": round(1e3 * float(np.mean(commits)), 4),
        "a commit, 99 of 100 below": round(1e3 * float(np.quantile(commits, 0.99)), 4),
        "a prompt, mean": round(1e3 * float(np.mean(prompts)), 3),
    }


def missed(laws: Mapping[str, Any], costs: Mapping[str, Any]) -> list[str]:
    """One line for each bar that is missed."""
    lines = []
    for law, found in laws.items():
        own, copy = (found[name]["questions"] for name in (_LM, _COPY))
        if copy < _LEAST_SHARE * own:
            lines.append(f"{law}: {copy} tokens per step, {copy / own:.2f} of {own}")
    for name, cost in costs.items():
        if cost["a commit, mean"] > _MOST_MS:
            lines.append(f"{name}: {cost['a commit, mean']} ms a commit, bar {_MOST_MS}")
    return lines


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("questions", type=Path)
    add("--config", type=Path, required=True)
    add("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    add("--others", type=Path, nargs="*", default=[], help="models with tokenizers of their own")
    add("--laws", nargs="+", default=["greedy", "t0.7"], help="greedy, t0.7, t0.7,p0.9,k50 ...")
    add("--per-task", type=int, default=3, help="questions of each task")
    add("--max-tokens", type=int, default=96)
    add("--nodes", type=int, default=8, help="of each tree")
    add("--out", type=Path, default=OUT / "drafting" / "vocabularies.json")
    arguments = parser.parse_args(words)
    config = load(arguments.config, arguments.overrides).config
    chosen = spec_bench.limit(spec_bench.load(arguments.questions), arguments.per_task)
    own = resolve(config.drafters[_LM].options["engine"]["model"])
    target = resolve(config.target.engine.model)
    copy = copy_with_tokenizer(own, target, arguments.out.parent / "copied-drafter")
    others = {each.name: each for each in arguments.others}
    config = with_models(config, {_COPY: copy, **others})
    laws: dict[str, Any] = {}
    for name in arguments.laws:
        law = sampling(name, arguments.max_tokens)
        texts = write_texts(config, chosen, [law])
        texts += python_texts(config, len(chosen) // 2, law)
        laws[name] = {
            each: tokens_per_step(config, each, texts, arguments.nodes) for each in config.drafters
        }
    costs = {each: reading_ms(config, each, texts) for each in config.drafters}
    settings = {
        "target": config.target.engine.model, "questions": len(chosen),
        "max_tokens": arguments.max_tokens, "nodes": arguments.nodes,
    }  # fmt: skip
    report = {"settings": settings, "tokens per step": laws, "milliseconds": costs}
    show_report(arguments.out, report)
    for line in (lines := missed(laws, costs)):
        print(f"missed: {line}", file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
