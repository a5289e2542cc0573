"""`drafthouse evaluate`: runs a configuration here, with drafts and without.

Answers come in pairs, of which each has its own order.  Every drafter is also tried alone, in a
cluster of its own, so that what the guard and the loop have learned of one tells nothing of others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from cluster.config.schema import Config
from cluster.core import SamplingParams, SpeculationOptions
from cluster.errors import ConfigError
from cluster.logs import say
from cluster.records import frozen
from cluster.requests.idle import IdleReason
from cluster.spec.acceptance import law_name
from cluster.spec.interval import Interval
from deployments.evaluate.prompts import EvaluatedPrompt, read_prompts
from deployments.report import rendered

if TYPE_CHECKING:
    from cluster.local import LLM
    from cluster.text.completion import Completion

_TEMPERATURES = (0.0, 0.7)
_PLAIN = SpeculationOptions(enabled=False)
# "" = some were verified.
_HAD_DRAFTS = frozenset(("", IdleReason.NOT_WORTH_IT, IdleReason.PAUSED))

# Of plain decoding's speed.  The whole 95 % interval must be at or above the first, or below the
# second.
PAYS_FROM, SLOWS_BELOW = 1.05, 0.98

Verdict = Literal["pays", "slows", "cannot tell"]


@frozen
class AskedPrompt:
    """A prompt with the parameters of both answers."""

    prompt: EvaluatedPrompt
    params: SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Cell:
    """Requests that are judged together.  law: greedy or sampled."""

    task: str
    segment: str
    law: str


@frozen
class Pair:
    """The same prompts answered with drafts and without, one after the other.

    rate, plain_rate: tokens per second after the first ones.  num_tokens: of the answers with
    drafts; accepted: draft tokens of each drafter among them.  had_drafts: some were at hand,
    whether it paid to verify them or not.
    """

    rate: float
    plain_rate: float
    num_tokens: int
    accepted: Mapping[str, int]
    had_drafts: bool = True


@frozen
class Judgement:
    """found: the speed-up by all drafters of the cell; alone: by each one alone."""

    cell: Cell
    drafts: Verdict
    found: Interval
    alone: Mapping[str, Interval]
    useless: tuple[str, ...]


Cells = Mapping[Cell, Sequence[AskedPrompt]]
Measure = Callable[[Sequence[str], Cells], Mapping[Cell, Sequence[Pair]]]


def evaluate(config: Config, arguments: argparse.Namespace) -> str:
    """Measure, and return what the command prints.

    Raises ConfigError for what cannot be measured."""
    if not config.drafters:
        raise ConfigError.at("drafters", "there is none, so there is nothing to evaluate")
    prompts = read_prompts(arguments.prompts, config.tasks)
    cells = _cells(prompts, arguments)
    bench = _Bench(config, arguments.concurrency)
    judgements = judge(cells, config, bench.pairs)
    if bench.num_unequal:
        say(
            f"{bench.num_unequal} of {bench.num_pairs} texts differ with and without drafts: near-"
            "ties, or under another law than coupled; target.engine.reproducible: true rules out "
            "the first"
        )
    if arguments.json:
        return json.dumps([dataclasses.asdict(each) for each in judgements], indent=2) + "\n"
    return rendered("evaluate", {"judgements": judgements})


def judge(cells: Cells, config: Config, measure: Measure) -> list[Judgement]:
    """Judge each cell.  measure: pairs of answers with these drafters alone."""
    together = measure(config.on_their_own, cells)
    alone: dict[Cell, dict[str, Sequence[Pair]]] = {cell: {} for cell in cells}
    for name in config.on_their_own:
        # The only drafter of a task needs no trial of its own.
        own = {
            cell: asked
            for cell, asked in cells.items()
            if {name} < {*config.drafters_of(cell.task)}
        }
        if own and name not in config.shadows.union(config.rollouts):
            for cell, pairs in measure((name,), own).items():
                alone[cell][name] = pairs
    judgements = []
    for cell, apart in alone.items():
        found = speedup(together[cell])
        speedups = {name: speedup(pairs) for name, pairs in apart.items()}
        useless = tuple(name for name, pairs in apart.items() if is_useless(name, pairs))
        judgements.append(Judgement(cell, verdict(found), found, speedups, useless))
    return judgements


def _cells(prompts: Sequence[EvaluatedPrompt], arguments: argparse.Namespace) -> Cells:
    found: dict[Cell, list[AskedPrompt]] = {}
    for place, prompt in enumerate(prompts):
        stated = prompt.temperature
        wanted = arguments.temperatures or _TEMPERATURES if stated is None else (stated,)
        for temperature in wanted:
            law = law_name(is_sampled=temperature > 0.0)
            params = SamplingParams(
                temperature, seed=place, max_tokens=prompt.max_tokens or arguments.max_tokens
            )
            asked = found.setdefault(Cell(prompt.task, prompt.segment, law), [])
            num_alike = sum((each > 0.0) == (temperature > 0.0) for each in wanted)
            if not arguments.limit or len(asked) < arguments.limit * num_alike:
                asked.append(AskedPrompt(prompt, params))
    return dict(sorted(found.items()))


def speedup(pairs: Sequence[Pair]) -> Interval:
    """Return the geometric mean of the pairs' ratios."""
    return Interval.of_ratios([[pair.rate / pair.plain_rate for pair in pairs]])


def verdict(found: Interval) -> Verdict:
    """Return what the interval says; a single pair says nothing."""
    if found.low is not None and found.low >= PAYS_FROM:
        return "pays"
    if found.high is not None and found.high < SLOWS_BELOW:
        return "slows"
    return "cannot tell"


def is_useless(name: str, pairs: Sequence[Pair]) -> bool:
    """True if the drafter, whose pairs are its own alone, slows its texts, or could not make them
    as fast as it takes to pay even if drafting cost nothing.

    The loop verifies so little of a bad drafter that its cost is hard to see, but what it brings is
    plain: every accepted token saves one step at most.  One that had no drafts for these prompts,
    as a grammar's where none is asked for, has shown nothing, whatever the clock said, and stays.
    """
    if not any(pair.had_drafts for pair in pairs):
        return False
    found = verdict(speedup(pairs))
    if found != "cannot tell":
        return found == "slows"
    ceiling = Interval.of_ratios(
        [[pair.num_tokens / max(pair.num_tokens - pair.accepted.get(name, 0), 1) for pair in pairs]]
    )
    return ceiling.high is not None and ceiling.high < PAYS_FROM


@dataclasses.dataclass(slots=True)
class _Bench:
    """Measures pairs, each set of drafters in a cluster of its own."""

    config: Config
    concurrency: int
    num_pairs: int = 0
    num_unequal: int = 0

    def pairs(self, names: Sequence[str], cells: Cells) -> dict[Cell, list[Pair]]:
        """Answer every prompt with these drafters and without."""
        from cluster.local import LLM  # torch takes seconds to import

        count = sum(map(len, cells.values()))
        say(f"{count} prompts with and without {', '.join(names)}")
        found: dict[Cell, list[Pair]] = {}
        with LLM(self._only(names)) as llm:
            for cell, asked in cells.items():
                # Not counted: the first answers are slower, and the loop learns from them.
                for is_first in (True, False):
                    self._pair(llm, cell, asked[: self.concurrency], "warm-up", is_first=is_first)
                found[cell] = []
                for turn, start in enumerate(range(0, len(asked), self.concurrency)):
                    batch = asked[start : start + self.concurrency]
                    pair = self._pair(llm, cell, batch, cell.law, is_first=turn % 2 == 0)
                    if pair is not None:
                        found[cell].append(pair)
                if not found[cell]:
                    raise ConfigError(f"all answers of {cell} end with their first tokens")
        return found

    def _pair(
        self, llm: LLM, cell: Cell, batch: Sequence[AskedPrompt], salt: str, *, is_first: bool
    ) -> Pair | None:
        """Answer a batch twice, first with drafts if is_first; None where nothing can be timed.

        salt: look-ups learn from earlier answers of the same, and with drafts only from those."""
        answers = {
            drafts: llm.generate(
                [_ids(llm, each.prompt) for each in batch],
                [each.params for each in batch],
                task=cell.task,
                cache_salt=f"{salt} {drafts}",
                speculation=None if drafts else _PLAIN,
            )
            for drafts in (is_first, not is_first)
        }
        drafted, plain = answers[True], answers[False]
        rates = _rate(drafted), _rate(plain)
        if not all(rates):
            return None
        self.num_pairs += len(batch)
        self.num_unequal += sum(
            ours.token_ids != theirs.token_ids for ours, theirs in zip(drafted, plain, strict=True)
        )
        return Pair(
            *rates,
            sum(len(each.token_ids) for each in drafted),
            sum((Counter(each.stats.accepted_by_drafter) for each in drafted), Counter[str]()),
            any(each.stats.idle_because in _HAD_DRAFTS for each in drafted),
        )

    def _only(self, names: Sequence[str]) -> Config:
        config = self.config
        kept = {part for name in names for part in (name, *config.drafters[name].stages)}
        return dataclasses.replace(
            config,
            drafters={name: each for name, each in config.drafters.items() if name in kept},
            tasks={
                task: tuple(name for name in listed if name in kept)
                for task, listed in config.tasks.items()
            },
        )


def _ids(llm: LLM, prompt: EvaluatedPrompt) -> Sequence[int]:
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ConfigError.at("target.engine.model", "prompts are text, and it has no tokenizer")
    if prompt.messages and tokenizer.chat_template:
        return list(tokenizer.apply_chat_template(prompt.messages))
    return list(tokenizer.encode(prompt.text))


def _rate(answers: Sequence[Completion]) -> float:
    """Return the tokens per second after the first ones; 0 where that is not known."""
    time_s = max(each.stats.decode_time_s for each in answers)
    num_tokens = sum(len(each.token_ids) - 1 for each in answers)
    return num_tokens / time_s if time_s > 0.0 and num_tokens > 0 else 0.0
