"""Configurations and references for tests that run the whole house on tiny checkpoints."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from cluster.config.schema import (
    Config,
    CoordinatorConfig,
    DrafterConfig,
    DrafterPlacement,
    EngineConfig,
    TargetConfig,
)
from cluster.core import SamplingParams, SpeculationOptions
from cluster.local import LLM, Completion
from tests.support.clock import wait_until
from tests.support.engine.tiny import tiny

PROMPTS = [
    [5, 6, 7, 8, 5, 6, 7],
    [11] * 40,
    list(range(3, 120)),
    [200, 17, 200, 17, 200],
]
PLAIN = SpeculationOptions(enabled=False)
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=24)
OPTIONS = {
    "temperature 0.7": replace(SEEDED, temperature=0.7),
    "temperature 1": SEEDED,
    "top_p": replace(SEEDED, top_p=0.9),
    "top_k": replace(SEEDED, top_k=50),
    "min_p": replace(SEEDED, min_p=0.05),
    "presence": replace(SEEDED, presence_penalty=0.8),
    "frequency": replace(SEEDED, frequency_penalty=0.5),
    "repetition": replace(SEEDED, repetition_penalty=1.3),
    "logit_bias": replace(SEEDED, logit_bias=((17, 4.0), (23, -50.0))),
    "min_tokens": replace(SEEDED, min_tokens=8, stop_token_ids=(17, 40, 99)),
    "greedy with penalties": replace(GREEDY, frequency_penalty=0.7, repetition_penalty=1.2),
}


def engine(folder: Path, num_pages: int = 256) -> EngineConfig:
    return tiny(folder, {}, num_pages=num_pages, max_context_len=512, max_batch_tokens=128)


def target(folder: Path, num_pages: int = 256) -> TargetConfig:
    return TargetConfig(engine=engine(folder, num_pages))


def drafting(folder: Path, found: dict[str, DrafterConfig]) -> Config:
    """A fixed budget verifies drafts in every step; the adaptive one may verify none here."""
    coordinator = CoordinatorConfig(budget="fixed", max_draft_tokens=8)
    return Config(target=target(folder), drafters=found, coordinator=coordinator)


def drafters(folder: Path, pool: Collection[str] = ()) -> dict[str, DrafterConfig]:
    """One of every kind.  pool: names of those that run beside the target, not inside it."""
    lm = {
        "engine": {
            "model": str(folder),
            "dtype": "float32",
            "device": "cpu",
            "num_pages": 256,
            "max_context_len": 512,
        }
    }
    found = {
        "lm": DrafterConfig(kind="lm", options=lm),
        "lookup": DrafterConfig(kind="prompt_lookup"),
        "ngram": DrafterConfig(kind="ngram_cache"),
    }
    places = {name: DrafterPlacement(with_="" if name in pool else "target") for name in found}
    return {name: replace(each, placement=places[name]) for name, each in found.items()}


def ids_of(found: Sequence[Completion]) -> list[list[int]]:
    """The texts, in tokens."""
    return [each.token_ids for each in found]


def hf_greedy(folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """transformers' own greedy text, up to but excluding an end-of-sequence token."""
    return [list(text) for text in _hf_greedy(folder, tuple(map(tuple, prompts)), max_tokens)]


@cache
def _hf_greedy(
    folder: Path, prompts: tuple[tuple[int, ...], ...], max_tokens: int
) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ends = model.generation_config.eos_token_id
    stops = set(ends if isinstance(ends, list) else [ends])
    texts: list[list[int]] = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([list(prompt)]),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=list(stops - {None}) or None,
            ),
        )
        text = output[0, len(prompt) :].tolist()
        texts.append(text[: next((i for i, t in enumerate(text) if t in stops), len(text))])
    return texts


def metrics_once(llm: LLM, are_so: Callable[[str], bool]) -> str:
    """The metrics as soon as they are so: a target tells of its own once a second."""
    wait_until(lambda: are_so(llm.metrics()))
    return llm.metrics()


def has_misses(page: str) -> bool:
    """Whether the target has lacked tokens of a text at a step."""
    return "drafthouse_target_cache_misses_total 0.0" not in page
