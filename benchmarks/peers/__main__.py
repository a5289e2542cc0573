"""Compares our system with the usual alternatives, in turns within one run.

    python -m benchmarks.grown work/grown --shape 231m
    python -m benchmarks.peers --target work/grown --prompts 10 --max-tokens 96 \
        --systems ours-plain,ours-lm,ours-all,transformers-plain,vllm-plain,vllm-draft \
        --vllm-python ../peer/bin/python

Every repetition gives every system one turn per sampling setting.  The order rotates by one each
time, so that drift of the machine affects all systems equally.  A turn starts the system, measures
each concurrency and stops it; no other system runs meanwhile.  --keep-running starts each system
once and checks before each turn that the others use no CPU; drafters and caches that learn from
earlier output then know the prompts from the second repetition on.

Each concurrency has its own prompts, at least as many as run at a time, so that no system has seen
the output of a prompt before it is measured.  All systems, with drafters and client, run on the
same --cores.  The same command goes on where it was interrupted.

`benchmarks/peers/summary.py` computes the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.makers import add_program_options, programs_of
from benchmarks.peers.report import markdown, picture
from benchmarks.peers.summary import cell_key, summarise
from benchmarks.peers.systems import PeerSettings, System, Turns, can_run, system_of
from benchmarks.support.answers import Law, figures
from benchmarks.support.options import (
    DEMO_DRAFT,
    add_config_options,
    laws,
    numbers,
    parser_of,
    words,
)
from benchmarks.support.processes import exit_on_sigterm
from benchmarks.support.prompts import KINDS, Prompt, prompts
from benchmarks.support.record import OUT, ROOT, Record, reason_of

_WARM_TOKENS = 2


def measure(
    record: Record, turns: Turns, asked: Mapping[int, Sequence[Prompt]], laws: Sequence[Law]
) -> None:
    """Measure the missing cells; a system that fails is recorded and skipped."""
    settings = record.settings
    for repetition in range(settings["repetitions"]):
        names = settings["systems"]
        start = repetition % len(names)
        for law in laws:
            for name in [*names[start:], *names[:start]]:
                missing = [
                    level
                    for level in settings["concurrency"]
                    if can_run(name, level)
                    and cell_key(repetition, law.name, level, name) not in record.results
                ]
                if not missing or name in record.failures:
                    continue
                try:
                    with turns.turn(name) as system:
                        for level in missing:
                            cell = _cell(system, asked[level], settings, law, level, repetition)
                            record.add(cell_key(repetition, law.name, level, name), cell)
                            _progress(repetition, law, level, name, cell)
                except (RuntimeError, OSError) as error:
                    record.failures[name] = reason_of(error)
                    print(f"{name} failed and is left out: {error}", file=sys.stderr, flush=True)


def _cell(
    system: System,
    asked: Sequence[Prompt],
    settings: Mapping[str, Any],
    law: Law,
    concurrency: int,
    repetition: int,
) -> dict[str, Any]:
    """Warm up and fill the prefix cache, then measure one cell."""
    system.run(asked, _WARM_TOKENS, law, concurrency, repetition)
    result = system.run(asked, settings["max_tokens"], law, concurrency, repetition)
    cell = figures(result, concurrency)
    for prompt, answer in zip(asked, cell["answers"], strict=True):
        answer["kind"] = prompt.kind
    return cell


def _progress(
    repetition: int, law: Law, concurrency: int, name: str, cell: Mapping[str, Any]
) -> None:
    print(
        f"run {repetition + 1}  {law.name:8} concurrency {concurrency:2}  {name:22} "
        f"{cell['tokens_per_s']:8.1f} tokens/s",
        file=sys.stderr,
        flush=True,
    )


def prompts_by_concurrency(
    levels: Sequence[int], count: int, tokenizer: Any, kinds: Sequence[str]
) -> dict[int, list[Prompt]]:
    """Disjoint sets of prompts, each at least as large as its concurrency."""
    sizes = [max(count, level) for level in levels]
    pool = iter(prompts(sum(sizes), tokenizer, kinds))
    return {
        level: [next(pool) for _ in range(size)] for level, size in zip(levels, sizes, strict=True)
    }


def within_repository(path: str) -> str:
    """`path` relative to the repository's root if it is below it, else its name."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(ROOT)) if absolute.is_relative_to(ROOT) else absolute.name


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    config = json.loads((Path(arguments.target) / "config.json").read_text("utf-8"))
    return {
        "target": within_repository(arguments.target),
        "grown_from": config.get("grown_from"),
        "draft": within_repository(arguments.draft),
        "dtype": arguments.dtype,
        "prompts": arguments.prompts,
        "kinds": arguments.kinds,
        "max_tokens": arguments.max_tokens,
        "systems": arguments.systems,
        "concurrency": arguments.concurrency,
        "laws": [law.name for law in arguments.laws],
        "repetitions": arguments.repetitions,
        "cores": arguments.cores,
        "config": arguments.config,
        "overrides": arguments.overrides,
        "keep_running": arguments.keep_running,
    }


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    cores = sorted(os.sched_getaffinity(0))
    add = parser.add_argument
    add("--target", required=True, help="checkpoint folder, the same for every system")
    add("--draft", default=str(DEMO_DRAFT), help="the peers' draft model")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--prompts", type=int, default=10, help="per cell; never fewer than run at a time")
    add("--kinds", type=words, default=list(KINDS), help=f"of {','.join(KINDS)}")
    add("--max-tokens", type=int, default=96)
    add("--systems", type=words, required=True)
    add("--concurrency", type=numbers, default=[1, 4, 16, 32])
    add("--laws", type=laws, default=laws("greedy,t0.8"))
    add("--repetitions", type=int, default=5)
    add("--cores", type=numbers, default=cores, help="of every system and of the client")
    add_config_options(parser)
    add_program_options(parser)
    add("--keep-running", action="store_true")
    add("--fresh", action="store_true", help="forget what was measured before")
    logs = Path(tempfile.gettempdir()) / "drafthouse-compare"
    add("--logs", type=Path, default=logs, help="folder for what the systems write to stderr")
    add("--out", type=Path, default=OUT / "peers" / "peers.json")
    return parser


def _prepare(arguments: argparse.Namespace) -> tuple[Record, Turns, dict[int, list[Prompt]]]:
    from transformers import AutoTokenizer

    peer_settings = PeerSettings(
        target=arguments.target, draft=arguments.draft, dtype=arguments.dtype,
        cores=tuple(arguments.cores), config=arguments.config,
        overrides=tuple(arguments.overrides), programs=programs_of(arguments),
        max_sequences=max(arguments.concurrency), log=arguments.logs,
    )  # fmt: skip
    systems = {name: system_of(name, peer_settings) for name in arguments.systems}
    record = Record(
        arguments.out, _settings(arguments), free=("repetitions", "systems"), fresh=arguments.fresh
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    asked = prompts_by_concurrency(
        arguments.concurrency, arguments.prompts, tokenizer, arguments.kinds
    )
    return record, Turns(systems, keep_running=arguments.keep_running), asked


def main() -> None:
    arguments = _parser().parse_args()
    try:
        record, turns, asked = _prepare(arguments)
    except (ValueError, KeyError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    os.sched_setaffinity(0, arguments.cores)
    exit_on_sigterm()
    try:
        measure(record, turns, asked, arguments.laws)
    finally:
        turns.stop_all()
        document = record.publish(summarise(record.settings, record.results))
        text = markdown(document)
        arguments.out.with_suffix(".md").write_text(text, "utf-8")
    print(text)
    try:
        picture(document, arguments.out.with_suffix(".png"))
    except RuntimeError as error:
        print(error, file=sys.stderr)
    if record.failures:
        raise SystemExit(f"not measured: {', '.join(record.failures)}")


if __name__ == "__main__":
    main()
