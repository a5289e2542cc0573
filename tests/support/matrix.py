"""What the matrix of laws compares: a request of every kind, answered with and without drafts."""

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from cluster.config.schema import (
    Config,
    CoordinatorConfig,
    DrafterConfig,
    TargetConfig,
)
from cluster.config.speculation import RolloutConfig
from cluster.core import FinishReason, Request, SamplingParams
from cluster.local import LLM, Completion
from cluster.records import frozen
from deployments.ingress.openai_request import Chat
from tests.deployments.test_openai_request import chat
from tests.deployments.test_tools import SERVED, tool
from tests.support import local_models
from tests.support.draft.other_vocabulary import other_copy
from tests.support.grammar.specs import FOLDER, SCHEMA, SPECS

DRAFT = FOLDER.with_name("demo-draft")
PLAIN = local_models.PLAIN
LAWS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=32, logprobs=2, seed=9),
    "seeded": SamplingParams(temperature=0.8, max_tokens=32, logprobs=2, seed=9),
}
PROMPTS = ["def read_lines(path):\n    ", "import json\n\n", "Once upon a time there was"]
# Of the greedy text as of the drawn one, the first words vary with the law alone.
LONG = "for name in sorted(names):\n    print(name)\n" * 22


_FOLDERS = tempfile.TemporaryDirectory(prefix="dh-matrix")


@cache
def other_vocabulary() -> Path:
    """The drafter with its tokens numbered by chance, and some of them left out."""
    return other_copy(DRAFT, Path(_FOLDERS.name) / "other", left_out=range(2000, 2400))


def config(num_pages: int = 256) -> Config:
    """A target with drafters of every sort that may change no text: models that are asked one by
    one, one of another vocabulary, one that is tried in the place of another, look-ups, and a
    recorder."""
    engine = replace(local_models.engine(FOLDER, num_pages), threads=1)

    def lm(folder: Path, rollout: RolloutConfig | None = None) -> DrafterConfig:
        known = local_models.drafters(folder)["lm"]
        options = {"engine": {**known.options["engine"], "threads": 1}}
        return DrafterConfig(kind="lm", options=options, rollout=rollout)

    recorded = {"tenants": "all", "share": 1.0, "folder": f"{_FOLDERS.name}/answers"}
    return Config(
        target=TargetConfig(engine=engine, generation_config="none"),
        drafters={
            "lm": lm(DRAFT),
            "other": lm(other_vocabulary()),
            "later": lm(other_vocabulary(), RolloutConfig(replaces="lm", canary_share=0.5)),
            "grammar": DrafterConfig(kind="grammar"),
            "suffix": DrafterConfig(kind="suffix"),
            "recorder": DrafterConfig(kind="recorder", options=recorded),
        },
        tasks=dict.fromkeys(("code", "default"), ("lm", "other", "grammar", "suffix")),
        # A fixed budget verifies drafts in every step; the adaptive one may verify none here.
        coordinator=CoordinatorConfig(budget="fixed", max_draft_tokens=8, keep_learned=False),
    )


def setting(**changes: Any) -> Callable[[LLM, SamplingParams], SamplingParams]:
    return lambda llm, law: replace(law, **changes)


@frozen
class Cell:
    """One kind of request.

    change: the law's parameters as this kind has them, given what the model says without.
    holds: what must be true of its texts, so that the cell is about what its name says.
    """

    change: Callable[[LLM, SamplingParams], SamplingParams | list[SamplingParams]] = setting()
    prompts: Sequence[Any] = (*PROMPTS,)
    stop: Callable[[LLM, SamplingParams], tuple[str, ...]] = lambda llm, law: ()
    ignore_eos: bool = True
    holds: Callable[[Sequence[Completion]], bool] = lambda found: True


def plain_texts(llm: LLM, law: SamplingParams) -> list[Completion]:
    return llm.generate(PROMPTS, law, speculation=PLAIN, ignore_eos=True)


def crossing_stops(llm: LLM, law: SamplingParams) -> tuple[str, ...]:
    """Of each text the end of one token with the start of the next: no token has it all."""
    stops = []
    for one in plain_texts(llm, law):
        for middle in range(len(one.token_ids) // 3, len(one.token_ids)):
            head = llm.tokenizer.decode(one.token_ids[:middle])
            whole = llm.tokenizer.decode(one.token_ids)
            stop = whole[len(head) - 2 : len(head) + 2]
            if len(head) > 2 and len(stop) == 4 and whole.startswith(head) and stop.strip():
                stops.append(stop)
                break
    assert stops, "no text has a place for a stop string"
    return tuple(stops)


def early_stops(llm: LLM, law: SamplingParams) -> SamplingParams:
    """Stop tokens that would end each text at its third token, which min_tokens forbids."""
    ends = {one.token_ids[2] for one in plain_texts(llm, law)}
    return replace(law, stop_token_ids=tuple(sorted(ends)), min_tokens=20)


def favoured(llm: LLM, law: SamplingParams) -> SamplingParams:
    """The text's own tokens less likely, another one more."""
    own = sorted({token for one in plain_texts(llm, law) for token in one.token_ids[:4]})
    return replace(law, logit_bias=(*((token, -3.0) for token in own), (own[0] + 1, 2.0)))


def strict_call() -> Any:
    asked = Chat.parse(chat(tools=[tool("weather", strict=True)], tool_choice="required"), SERVED)
    return asked.spec.params.grammar


def all_stopped(found: Sequence[Completion]) -> bool:
    return all(one.finish_reason is FinishReason.STOP for one in found)


def are_valid(found: Sequence[Completion]) -> bool:
    """Whether all are JSON of the schema, written with drafts of the grammar."""
    for one in found:
        jsonschema.validate(json.loads(one.text), SCHEMA)
    return all_stopped(found) and any(one.stats.accepted_by_drafter.get("grammar") for one in found)


def structured(**more: Any) -> Cell:
    return Cell(
        setting(grammar=SPECS["json_schema"], max_tokens=80, **more),
        ignore_eos=False,
        holds=are_valid,
    )


def mixed(llm: LLM, law: SamplingParams) -> list[SamplingParams]:
    """Another kind of request at each prompt of one batch."""
    return [
        law,
        replace(law, repetition_penalty=1.2),
        favoured(llm, law),
        replace(law, grammar=SPECS["json_schema"], max_tokens=80),
        replace(law, min_p=0.1),
        replace(law, logprobs=None),
    ]


CELLS = {
    "plain law": Cell(),
    "structured output": structured(),
    "structured output, top_p and min_tokens": structured(top_p=0.9, min_tokens=20),
    "strict tools": Cell(
        setting(grammar=strict_call(), max_tokens=120),
        ignore_eos=False,
        holds=lambda found: all('"weather"' in one.text for one in found),
    ),
    "logprobs": Cell(
        setting(logprobs=5),
        holds=lambda found: all(len(each.top) == 5 for one in found for each in one.logprobs),
    ),
    "min_p": Cell(setting(min_p=0.1)),
    "logit_bias": Cell(favoured),
    "penalties": Cell(setting(presence_penalty=0.5, frequency_penalty=0.4, repetition_penalty=1.2)),
    "stop strings": Cell(stop=crossing_stops, holds=all_stopped),
    "min_tokens": Cell(
        early_stops,
        ignore_eos=False,
        holds=lambda found: all(len(one.token_ids) >= 20 for one in found),
    ),
    "n > 1": Cell(prompts=[PROMPTS[0]] * 4),
    "long context": Cell(prompts=[LONG, LONG + "names = [", PROMPTS[0]]),
    "batch of prompts": Cell(mixed, prompts=[*PROMPTS, *PROMPTS]),
}


async def neighbour(llm: LLM, law: SamplingParams, num_tokens: int) -> int:
    """A request that is aborted once it has so many tokens; returns how many it had."""
    coordinator, tokenizer = llm._coordinator, llm.tokenizer
    name = f"neighbour-{num_tokens}"
    asked = Request(name, tokenizer.encode(LONG), replace(law, max_tokens=100))
    count = 0
    async with asyncio.timeout(60):
        async for event in coordinator.submit(asked):
            count += len(event.token_ids)
            if count >= num_tokens:
                break
    coordinator.cancel(name)
    return count
