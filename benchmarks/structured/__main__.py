"""Measures answers under JSON schemas: their validity, and their cost compared with free text.

    python -m benchmarks.structured --count 500

Each question is answered under its schema with speculation on and off, and then, with as many
tokens as the answer had, without a schema.  All runs in one process, with the whole stack but HTTP.
The prompts are read before anything is timed, so that every way finds them in the prefix cache.
The order of speculation on and off alternates from batch to batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.structured.schemas import Task, tasks
from benchmarks.support.record import OUT, show_report
from cluster.config.file import load
from cluster.config.schema import Config
from cluster.core import FinishReason, SamplingParams, SpeculationOptions
from cluster.local import LLM, Completion
from cluster.requests.grammar_spec import GrammarSpec

_PLAIN = SpeculationOptions(enabled=False)
# Tokens of a prompt with its schema and its answer, and as many again for the prefix cache.
_TOKENS_PER_TEXT = 2048


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured", description=__doc__)
    parser.add_argument("--config", default="configs/local.yaml")
    parser.add_argument("--count", type=int, default=500, help="questions")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", choices=("llguidance", "xgrammar"), default="llguidance")
    parser.add_argument("--out", type=Path, default=OUT / "structured" / "structured.json")
    options = parser.parse_args()
    config = load(options.config).config
    answers = replace(config.answers, grammar_backend=options.backend)
    with LLM(_inside(replace(config, answers=answers), options.concurrency)) as llm:
        report = measure(llm, tasks(options.count, options.seed), options)
    show_report(options.out, report)


def _inside(config: Config, concurrency: int) -> Config:
    """Keep only the residents among the drafters: others need processes of a cluster.

    By default the KV cache would take a quarter of the machine's free memory; here it gets only the
    memory that these texts need.
    """
    drafters = {name: config.drafters[name] for name in config.residents}
    engine = config.target.engine
    engine = replace(engine, num_pages=concurrency * _TOKENS_PER_TEXT // engine.page_size)
    return replace(config, drafters=drafters, target=replace(config.target, engine=engine))


def measure(llm: LLM, asked: Sequence[Task], options: argparse.Namespace) -> dict[str, Any]:
    """Measure every way of answering, in turns by batches, so that drift affects all equally."""
    ways = {name: _Way() for name in ("constrained", "constrained plain", "free", "free plain")}
    params = SamplingParams(
        temperature=options.temperature, seed=options.seed, max_tokens=options.max_tokens
    )
    unequal = 0
    _warm_up(llm, params)
    for index, start in enumerate(range(0, len(asked), options.concurrency)):
        batch = asked[start : start + options.concurrency]
        prompts = [_prompt(llm, task) for task in batch]
        llm.generate(prompts, replace(params, max_tokens=1), speculation=_PLAIN)
        held = [
            replace(params, grammar=GrammarSpec("json_schema", json.dumps(task.schema)))
            for task in batch
        ]
        drafting = (None, _PLAIN) if index % 2 else (_PLAIN, None)
        one, other = (
            ways[_named("constrained", each)].run(llm, prompts, held, batch, each)
            for each in drafting
        )
        unequal += sum(a.token_ids != b.token_ids for a, b in zip(one, other, strict=True))
        # The end-of-sequence token was drawn too.
        lengths = [len(each.token_ids) + (each.finish_reason is FinishReason.STOP) for each in one]
        free = [replace(params, max_tokens=length) for length in lengths]
        for each in drafting:
            ways[_named("free", each)].run(llm, prompts, free, batch, each, ignore_eos=True)
    summary: dict[str, Any] = {name: way.summary() for name, way in ways.items()}
    return {
        "settings": {
            "model": llm.config.model_name or llm.config.target.engine.model,
            "questions": len(asked), "concurrency": options.concurrency,
            "max_tokens": options.max_tokens, "temperature": options.temperature,
            "backend": llm.config.answers.grammar_backend,
            "drafters": sorted(llm.config.drafters),
        },
        "valid": f"{ways['constrained'].valid} of {ways['constrained'].ended}",
        "texts_changed_by_drafts": unequal,
        "speed_of_constrained": _ratio(ways["free"], ways["constrained"]),
        "speed_of_constrained_plain": _ratio(ways["free plain"], ways["constrained plain"]),
        "speed_of_drafts": _ratio(ways["constrained plain"], ways["constrained"]),
        "summary": summary,
    }  # fmt: skip


def _named(kind: str, speculation: SpeculationOptions | None) -> str:
    return kind if speculation is None else f"{kind} plain"


def _ratio(slow: _Way, quick: _Way) -> float:
    """Return how many times as fast the second is: the median over the batches, because a pause of
    the machine may spoil a batch."""
    pairs = zip(slow.seconds, quick.seconds, strict=True)
    return round(statistics.median(one / other for one, other in pairs), 3)


class _Way:
    """One way of answering.

    ended: answers that ended with stop; valid: the valid ones of them.  seconds: of each batch.
    """

    def __init__(self) -> None:
        self.valid = self.ended = self._tokens = self._steps = 0
        self.seconds: list[float] = []
        self._valid_by_family: Counter[str] = Counter()
        self._ended_by_family: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()

    def run(
        self,
        llm: LLM,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        batch: Sequence[Task],
        speculation: SpeculationOptions | None = None,
        *,
        ignore_eos: bool = False,
    ) -> list[Completion]:
        started = time.perf_counter()
        # Free text has its own task: otherwise look-ups would draft it from the question's answer.
        found = llm.generate(
            list(prompts), params, task="free" if ignore_eos else "held",
            speculation=speculation, ignore_eos=ignore_eos,
        )  # fmt: skip
        self.seconds.append(time.perf_counter() - started)
        for task, completion in zip(batch, found, strict=True):
            has_ended = completion.finish_reason is FinishReason.STOP
            self._tokens += len(completion.token_ids) + has_ended
            self._steps += completion.stats.num_steps
            self._accepted.update(completion.stats.accepted_by_drafter)
            if has_ended:
                self.ended += 1
                self._ended_by_family[task.family] += 1
                is_right = is_valid(completion.text, task)
                self.valid += is_right
                self._valid_by_family[task.family] += is_right
        return found

    def summary(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "tokens_per_s": round(self._tokens / max(sum(self.seconds), 1e-9), 1),
            "tokens_per_step": round(self._tokens / max(self._steps, 1), 3),
            "accepted_by_drafter": dict(self._accepted),
            "ended": dict(self._ended_by_family),
            "valid": dict(self._valid_by_family),
        }


def is_valid(text: str, task: Task) -> bool:
    """True if an answer obeys its schema, as `jsonschema` checks it."""
    try:
        jsonschema.validate(json.loads(text), task.schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _prompt(llm: LLM, task: Task) -> list[int]:
    assert llm.tokenizer is not None
    if not llm.tokenizer.has_chat_template:
        return list(llm.tokenizer.encode(task.question + "\n").tolist())
    message = {"role": "user", "content": f"{task.question} Schema: {json.dumps(task.schema)}"}
    return list(llm.tokenizer.apply_chat_template([message]).tolist())


def _warm_up(llm: LLM, params: SamplingParams) -> None:
    """Run some texts first, from which step times and acceptance are learned."""
    for task in tasks(4, seed=0):
        held = replace(params, grammar=GrammarSpec("json_schema", json.dumps(task.schema)))
        llm.generate([_prompt(llm, task)] * 2, [held, replace(params, max_tokens=64)])


if __name__ == "__main__":
    main()
