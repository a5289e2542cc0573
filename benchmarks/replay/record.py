"""Records a target's texts, and the tree of each drafter at every place of them.

    python -m benchmarks.replay.record QUESTIONS OUT --config configs/local.yaml

QUESTIONS: Spec-Bench's JSONL.  The target answers every question once greedily and once at the
given temperature; then each drafter of the configuration is led along the texts, token by token,
and its complete tree is kept.  Drafters that remember past outputs meet the texts in that order.
Those that read what the target thought likely (`token_recycling`) read it of the text's own rows;
beside a running target they read rejected drafts' rows too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from benchmarks.replay.along import Led, Recording
from benchmarks.spec_bench import questions as spec_bench
from benchmarks.support.options import add_config_options, add_options, parser_of
from cluster.config.file import load
from cluster.config.schema import Config
from cluster.core import (
    EMPTY_FLOATS,
    EMPTY_TREE,
    FloatArray,
    SamplingParams,
    TokenTree,
    token_array,
)
from cluster.draft import registry
from cluster.draft.base import Drafter, DrafterContext
from cluster.draft.inside import StepReader
from cluster.local import LLM
from cluster.simulate.world import COLUMNS, FORMAT, RecordedText, RecordedTrees

# The control loop never uses more nodes of one sequence in one step.
_MAX_NODES = 32
_REQUEST = "recorded"
# The most probable tokens of each row that are kept for drafters that read them.
_NUM_TOP = 8


def write_texts(
    config: Config,
    questions: Sequence[spec_bench.Question],
    laws: Sequence[SamplingParams],
) -> list[Recording]:
    """Let the target answer under each law in turn."""
    plain = replace(config, drafters={}, tasks={})
    written: list[Recording] = []
    with LLM(plain) as llm:
        tokenizer = llm.tokenizer
        if tokenizer is None:
            raise SystemExit(f"{config.target.engine.model} has no tokenizer; name a chat model")
        prompts = []
        for question in questions:
            message = {"role": "user", "content": question.turns[0]}
            prompts.append(tokenizer.apply_chat_template([message]))
        for law in laws:
            params = [replace(law, seed=index, logprobs=_NUM_TOP) for index in range(len(prompts))]
            answers = llm.generate(list(prompts), params)
            for question, prompt, own, answer in zip(
                questions, prompts, params, answers, strict=True
            ):
                ids = token_array(answer.token_ids)
                written.append(Recording(prompt, ids, own, question.category, answer.logprobs))
    return written


def created(config: Config, name: str, max_nodes: int) -> Drafter:
    """The configuration's drafter, beside recordings in place of a target.

    Raises SystemExit for one that wants more of the target's rows than their likely tokens.
    """
    # What stands for the target has nothing to be asked for.
    target_model = config.target.engine.model
    context = DrafterContext(name, max_nodes, 4, target=object(), target_model=target_model)
    drafter = registry.create(name, config.drafters[name], context)
    if isinstance(drafter, StepReader) and drafter.wants.taps:
        raise SystemExit(f"{name} reads hidden states, which are not recorded; leave it out")
    return drafter


def record_trees(drafter: Drafter, text: Recording) -> RecordedTrees:
    """Record the drafter's complete tree at every place of the text, token by token."""
    led, trees = Led(drafter, text, _MAX_NODES, _REQUEST), list[tuple[TokenTree, FloatArray]]()
    led.begin()
    for position in range(len(text.output_ids)):
        if position:
            led.go_on(1)
        newest = led.tree()
        trees.append((newest.tree, newest.survival) if newest else (EMPTY_TREE, EMPTY_FLOATS))
    drafter.release([_REQUEST])
    return RecordedTrees.of(trees)


def record(config: Config, written: Sequence[Recording]) -> list[RecordedText]:
    """Lead every drafter of the configuration along the texts."""
    trees: list[dict[str, RecordedTrees]] = [{} for _ in written]
    for name, settings in config.drafters.items():
        drafter = created(config, name, settings.max_nodes)
        for own, text in zip(trees, tqdm(written, desc=name, file=sys.stderr), strict=True):
            own[name] = record_trees(drafter, text)
    return [
        RecordedText(
            len(text.prompt_ids), text.output_ids, text.task, text.params.temperature > 0.0, own
        )
        for text, own in zip(written, trees, strict=True)
    ]


def save(path: Path, texts: Sequence[RecordedText], about: Mapping[str, object]) -> None:
    """Write `texts`; about: how they were recorded, for whoever reads the file later."""
    drafters = sorted(texts[0].trees) if texts else []
    header = {
        "format": FORMAT,
        "about": dict(about),
        "drafters": drafters,
        "texts": [[text.prompt_len, text.task, text.is_sampled] for text in texts],
    }
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    }
    for index, text in enumerate(texts):
        arrays[f"{index}.text"] = text.token_ids
        for number, name in enumerate(drafters):
            for column in COLUMNS:
                arrays[f"{index}.{number}.{column}"] = getattr(text.trees[name], column)
            # Survivals are estimates: three digits say all there is to them.
            arrays[f"{index}.{number}.survival"] = text.trees[name].survival.astype(np.float16)
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("questions", type=Path)
    parser.add_argument("out", type=Path)
    add_config_options(parser, "configs/local.yaml")
    add_options(
        parser,
        per_task=(4, "questions of each category"),
        temperature=0.8,
        max_tokens=128,
    )
    options = parser.parse_args(arguments)
    config = load(options.config, options.overrides).config
    chosen = spec_bench.limit(spec_bench.load(options.questions), options.per_task)
    laws = [
        SamplingParams(temperature=each, max_tokens=options.max_tokens)
        for each in (0.0, options.temperature)
    ]
    written = write_texts(config, chosen, laws)
    about = {
        "model": config.target.engine.model,
        "temperature": options.temperature,
        "drafters": {name: each.kind for name, each in config.drafters.items()},
    }
    save(options.out, record(config, written), about)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
