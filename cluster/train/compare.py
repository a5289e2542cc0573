"""Drafters of one target side by side, by depth and task: `--evaluate` after a training.

The target answers questions greedily with each drafter alone, as it would serve.  Every step
verifies a fixed number of drafts, so the figures depend on no machine's speed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from cluster.config.schema import (
    Config,
    CoordinatorConfig,
    DrafterConfig,
    DrafterPlacement,
    EngineConfig,
    TargetConfig,
)
from cluster.core import SamplingParams, SpeculationStats
from cluster.draft.heads.checkpoint import HeadConfig
from cluster.draft.heads.load import format_of
from cluster.errors import ConfigError
from cluster.local import LLM
from cluster.models.made_for import folder_made_for
from cluster.records import frozen
from cluster.train.chat_heads import target_of
from cluster.train.trainer import processes

_PER_TASK = 8
_LAW = SamplingParams(temperature=0.0, max_tokens=96, seed=1)
# Characters at the end of a longer question that are asked.
_MAX_CHARS = 2000
_NUM_DRAFTS = 8
_NUM_DEPTHS = 4
_MEMORY_SHARE = 0.1


# What the user says, by task.
Questions = Mapping[str, Sequence[str]]


@frozen
class Acceptance:
    """Of a drafter on the questions of a task.

    tokens_per_step: over all steps.  by_depth: shares of the steps with drafts that accepted at
    least one, two and so on.
    """

    tokens_per_step: float
    by_depth: tuple[float, ...]

    @classmethod
    def of(cls, num_tokens: int, answers: Sequence[SpeculationStats]) -> Acceptance:
        num_steps = sum(each.num_steps for each in answers)
        num_spec_steps = sum(each.num_spec_steps for each in answers)
        reached = [
            sum(sum(each.acceptance_histogram[depth:]) for each in answers)
            for depth in range(1, _NUM_DEPTHS + 1)
        ]
        shares = tuple(count / max(num_spec_steps, 1) for count in reached)
        return cls(num_tokens / max(num_steps, 1), shares)


def read_questions(path: Path, per_task: int = _PER_TASK) -> Questions:
    """Some questions of each task: Spec-Bench's JSONL, or excerpts, which are to be continued."""
    found: dict[str, list[str]] = {}
    try:
        # Texts may hold what else ends a line.
        for line in filter(None, path.read_text(encoding="utf-8").split("\n")):
            data = json.loads(line)
            if "turns" in data:
                task, text = data["category"], data["turns"][0]
            else:
                task, text = data["kind"], f"Continue this text.\n\n{data['text'][-_MAX_CHARS:]}"
            found.setdefault(task, []).append(text)
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path}: no questions ({error!r}); give JSON lines with category and turns, as "
            "Spec-Bench's question.jsonl, or with kind and text, as models/heldout.jsonl"
        ) from error
    return {task: _spread(texts, min(per_task, len(texts))) for task, texts in found.items()}


def drafters_of(target: str, folders: Iterable[Path]) -> dict[str, DrafterConfig]:
    """The folders that were made for the target, by their names, and one that needs no weights."""
    served, found = target_of(target), {"suffix": DrafterConfig(kind="suffix")}
    for folder in folders:
        made_for = folder_made_for(folder)
        if made_for.name and made_for.fits(served):
            found[folder.name] = _drafter_in(folder)
    return found


def compare(
    target: str, drafters: Mapping[str, DrafterConfig], questions: Questions
) -> dict[str, dict[str, Acceptance]]:
    """By drafter and task."""
    engine = EngineConfig(
        model=target, device=str(processes().device), threads=torch.get_num_threads()
    )
    config = Config(
        target=TargetConfig(engine=engine),
        coordinator=CoordinatorConfig(budget="fixed", max_draft_tokens=_NUM_DRAFTS),
    )
    return {name: _alone(config, name, each, questions) for name, each in drafters.items()}


def table(found: Mapping[str, Mapping[str, Acceptance]]) -> str:
    """Tab-separated, a line for each task and drafter."""
    depths = "\t".join(f"depth {depth}" for depth in range(1, _NUM_DEPTHS + 1))
    lines = [f"task\tdrafter\ttokens per step\t{depths}"]
    for task in next(iter(found.values()), {}):
        for name, by_task in found.items():
            figures = (by_task[task].tokens_per_step, *by_task[task].by_depth)
            lines.append("\t".join((task, name, *(f"{value:.3f}" for value in figures))))
    return "\n".join(lines)


def _alone(
    config: Config,
    name: str,
    drafter: DrafterConfig,
    questions: Questions,
) -> dict[str, Acceptance]:
    resident = replace(drafter, placement=DrafterPlacement(with_="target"))
    found: dict[str, Acceptance] = {}
    with LLM(replace(config, drafters={name: resident})) as llm:
        if llm.tokenizer is None:
            raise ConfigError(f"{config.target.engine.model}: there is no tokenizer to ask with")
        for task, asked in questions.items():
            answers = []
            for text in tqdm(asked, desc=f"{name}, {task}"):
                prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])
                # One by one: what a drafter learns of an answer it has for the next one.
                answers += llm.generate([prompt.tolist()], _LAW, task=task)
            num_tokens = sum(len(answer.token_ids) for answer in answers)
            found[task] = Acceptance.of(num_tokens, [answer.stats for answer in answers])
    return found


def _spread(texts: Sequence[str], count: int) -> list[str]:
    """So many, evenly from all over them."""
    return [texts[place * len(texts) // count] for place in range(count)]


def _drafter_in(folder: Path) -> DrafterConfig:
    try:
        kind = format_of(HeadConfig(folder))
    except ConfigError:  # an ordinary model
        model = {"model": str(folder), "memory_fraction": _MEMORY_SHARE}
        return DrafterConfig(kind="lm", options={"engine": model})
    return DrafterConfig(kind=kind, options={"model": str(folder)})
