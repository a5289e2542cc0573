"""Measures drafters inside the target by the length of the context.

    python -m benchmarks.drafting.contexts QUESTIONS --config configs/local.yaml \\
        --set drafters.recycling.kind=token_recycling \\
        --drafters none lm suffix recycling lm+suffix --markdown contexts.md

QUESTIONS: Spec-Bench's JSONL, for summaries and for answers from documents; files to continue come
from Python's own library.  The end of a prompt is the same at every length, so the answers are
about the same thing: a longer prompt has other documents of the same kind, or more of the file,
before it.  Each prompt has been read before it is timed, by target and drafters.

Prefix hits are those of a second turn: the share of a conversation, with the answer that was just
written, that the target finds in its prefix cache.

Results are kept beside --out and a later run adds to them, so that one run may measure one drafter
at one length.

Bars: tokens per step at the longer lengths at least 0.9 of those at the first one; prefix hits with
drafts those without within 0.01.  Exit status 1 if one is missed.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.drafting.steps import Figures, figures_of
from benchmarks.spec_bench import questions as spec_bench
from benchmarks.support.options import numbers, parser_of
from benchmarks.support.record import OUT, Record
from cluster.config.file import load
from cluster.config.schema import Config, DrafterPlacement
from cluster.core import SamplingParams
from cluster.local import LLM
from cluster.text.tokenizer import Tokenizer

_DOCUMENTS = ("summarization", "rag")
_FILES = "code"
_MIN_FILE_CHARS = 40_000
_WARM_UP_TOKENS = 16
_SECOND_TURN = "Say that again in one sentence."
_NO_DRAFTERS = "none"
_MIN_SHARE = 0.9
_MAX_HIT_DIFFERENCE = 0.01


@dataclass(frozen=True, slots=True)
class ContextFigures:
    """tokens_per_step: by kind of prompt.  prefix_hits: share of the tokens of the second turns'
    prompts."""

    figures: Figures
    tokens_per_step: dict[str, float]
    prefix_hits: float


def messages(questions: Sequence[spec_bench.Question], per_kind: int) -> dict[str, list[str]]:
    """By kind, what the user says, far longer than any context; its end matters."""
    found: dict[str, list[str]] = {}
    for kind in _DOCUMENTS:
        texts = [each.turns[0] for each in questions if each.category == kind]
        chosen = texts[:: max(len(texts) // per_kind, 1)][:per_kind]
        before = "\n\n".join(text for text in texts if text not in chosen)
        found[kind] = [f"{before}\n\n{text}" for text in chosen]
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text for each in files if len(text := each.read_text("utf-8")) > _MIN_FILE_CHARS]
    # Files end in what is special about them; the middle is like the rest of the file.
    found[_FILES] = [text[: 3 * len(text) // 4] for text in texts[:: len(texts) // per_kind]]
    return {kind: texts[:per_kind] for kind, texts in found.items()}


def prompt_of(tokenizer: Tokenizer, kind: str, message: str, length: int) -> list[int]:
    """The prompt of at most so many tokens that keeps the message's end, nearly as long."""
    opening = "Continue this Python file:\n\n" if kind == _FILES else ""
    token_ids = tokenizer.encode(message, add_special_tokens=False)
    kept, prompt = length, list[int]()
    while not prompt or len(prompt) > length:
        text = opening + tokenizer.decode(token_ids[-kept:])
        prompt = list(tokenizer.apply_chat_template([{"role": "user", "content": text}]))
        kept -= max(len(prompt) - length, 1)
    return prompt


def measure(
    config: Config, names: Sequence[str], asked: dict[str, list[str]], length: int,
    law: SamplingParams,
) -> ContextFigures:  # fmt: skip
    """Measure new drafters on all prompts, one at a time."""
    drafters = {
        name: replace(config.drafters[name], placement=DrafterPlacement(host="target"))
        for name in names
    }
    task = f"{length} tokens"
    with LLM(replace(config, drafters=drafters, tasks={})) as llm:
        assert llm.tokenizer is not None, "the prompts need a tokenizer"
        prompts = [
            (kind, prompt_of(llm.tokenizer, kind, text, length))
            for kind, texts in asked.items()
            for text in texts
        ]
        for _, prompt in prompts:
            llm.generate([prompt], replace(law, max_tokens=_WARM_UP_TOKENS), task="warm-up")
        before, answers = llm.metrics(), []
        for seed, (kind, prompt) in enumerate(tqdm(prompts, desc=task, file=sys.stderr)):
            (answer,) = llm.generate([prompt], replace(law, seed=seed), task=task)
            answers.append((kind, prompt, answer))
        stats = [(len(answer.token_ids), answer.stats) for _, _, answer in answers]
        figures = figures_of(stats, before, llm.metrics(), task)
        by_kind = {
            kind: sum(len(each.token_ids) for own, _, each in answers if own == kind)
            / sum(each.stats.num_steps for own, _, each in answers if own == kind)
            for kind in asked
        }
        more = llm.tokenizer.encode(_SECOND_TURN, add_special_tokens=False).tolist()
        turns = [[*prompt, *answer.token_ids, *more] for _, prompt, answer in answers]
        again = llm.generate(turns, replace(law, max_tokens=1), task="second turn")
        hits = sum(each.num_cached for each in again) / sum(map(len, turns))
    return ContextFigures(figures, by_kind, hits)


# drafters -> length -> figures, as `ContextFigures` in JSON.
Report = dict[str, dict[int, dict[str, Any]]]

# Columns of the table: heading, figure and format.
_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], float | None], str], ...] = (
    ("tokens per step", lambda each: each["figures"]["tokens_per_step"], "{:.2f}"),
    ("drafting, ms per step", lambda each: each["figures"]["draft_ms"], "{:.1f}"),
    ("the target, ms per step", lambda each: each["figures"]["step_ms"], "{:.1f}"),
    ("prefix hits of a second turn", lambda each: each["prefix_hits"], "{:.4f}"),
)


def report_of(results: dict[str, dict[str, Any]]) -> Report:
    """The results, whose keys are "drafters/length", by drafters and length."""
    report: Report = {}
    for key, each in results.items():
        name, _, length = key.rpartition("/")
        report.setdefault(name, {})[int(length)] = each
    return {name: dict(sorted(by_length.items())) for name, by_length in report.items()}


def markdown(report: Report) -> str:
    """One table: drafters by figures, each at all lengths."""
    lines = ["| drafters | tokens | " + " | ".join(title for title, _, _ in _COLUMNS) + " |"]
    lines.append("|---|---|" + "---|" * len(_COLUMNS))
    for name, by_length in report.items():
        cells = [" / ".join(map(str, by_length))]
        for _, figure, form in _COLUMNS:
            values = map(figure, by_length.values())
            cells.append(" / ".join("-" if each is None else form.format(each) for each in values))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def missed(report: Report) -> list[str]:
    """One line for each bar that is missed."""
    lines = []
    for name, by_length in report.items():
        _, figure, _ = _COLUMNS[0]
        shortest = figure(next(iter(by_length.values()))) or 1.0
        for length, each in by_length.items():
            share = (figure(each) or 0.0) / shortest
            if share < _MIN_SHARE:
                lines.append(f"{name}, {length}: {share:.2f} of the shortest, bar {_MIN_SHARE}")
            plain = report.get(_NO_DRAFTERS, {}).get(length, each)["prefix_hits"]
            if abs(each["prefix_hits"] - plain) > _MAX_HIT_DIFFERENCE:
                lines.append(f"{name}, {length}: prefix hits {each['prefix_hits']}, plain {plain}")
    return lines


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("questions", type=Path)
    add("--config", type=Path, required=True)
    add("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    add("--drafters", nargs="+", required=True, help=f"a+b: merged in one tree; {_NO_DRAFTERS}")
    add("--lengths", type=numbers, default=[1024, 4096, 7168], help="of the prompts, in tokens")
    add("--per-kind", type=int, default=3, help="prompts of each kind")
    add("--max-tokens", type=int, default=96)
    add("--nodes", type=int, default=8, help="verified per step")
    add("--temperature", type=float, default=0.0)
    add("--fresh", action="store_true", help="forget the results so far")
    add("--out", type=Path, default=OUT / "drafting" / "contexts.json")
    add("--markdown", type=Path, help="write the table there, too")
    arguments = parser.parse_args(words)
    config = load(arguments.config, arguments.overrides).config
    fixed = replace(config.coordinator, budget="fixed", max_draft_tokens=arguments.nodes)
    config = replace(config, coordinator=fixed)
    asked = messages(spec_bench.load(arguments.questions), arguments.per_kind)
    law = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)
    settings = {
        "target": config.target.engine.model, "prompts of each kind": arguments.per_kind,
        "max_tokens": arguments.max_tokens, "nodes": arguments.nodes,
        "temperature": arguments.temperature,
    }  # fmt: skip
    record = Record(arguments.out, settings, fresh=arguments.fresh)
    for name in arguments.drafters:
        names = [] if name == _NO_DRAFTERS else name.split("+")
        for length in arguments.lengths:
            found = measure(config, names, asked, length, law)
            record.add(f"{name}/{length}", asdict(found))
    report = report_of(record.results)
    record.publish(report)
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(report), encoding="utf-8")
    print(markdown(report))
    for line in missed(report):
        print(f"missed: {line}", file=sys.stderr)
    return int(bool(missed(report)))


if __name__ == "__main__":
    sys.exit(main())
