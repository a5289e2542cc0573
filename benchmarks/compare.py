"""Compares our system with the usual alternatives, in turns within one run.

    python -m benchmarks.grow work/grown --shape 231m
    python -m benchmarks.compare --target work/grown --prompts 10 --max-tokens 96 \
        --systems ours-plain,ours-lm,ours-all,transformers-plain,vllm-plain,vllm-draft \
        --vllm-python ../peer/bin/python

Every repetition gives every system one turn per sampling setting.  The order rotates by one each
time, so that drift of the machine affects all systems equally.  A turn starts the system, measures
each concurrency and stops it; no other system runs meanwhile.  --keep-running starts each system
once and checks before each turn that the others use no CPU; drafters and caches that learn from
earlier output then know the prompts from the second repetition on.

Each concurrency has its own prompts, at least as many as run at a time, so that no system has seen
the output of a prompt before it is measured.  All systems, with drafters and client, run on the
same --cores.  Finished cells are saved in docs/benchmarks/compare.json; --resume continues from
them.

`benchmarks/comparison.py` computes the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.answers import Law, figures
from benchmarks.comparison import cell_key, summarise
from benchmarks.peers import PeerSettings, System, Turns, can_run, system_of
from benchmarks.prompts import KINDS, Prompt, prompts
from benchmarks.report import markdown, picture
from benchmarks.serving import ROOT, machine, reason_of

OUT = ROOT / "docs" / "benchmarks"
_WARM_TOKENS = 2


class Comparison:
    """The cells measured so far, saved after each one."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        """Raises ValueError to resume from `path` if its cells have other settings."""
        self.path = path
        self.settings = dict(settings)
        self.cells: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        if resume and path.exists():
            former = json.loads(path.read_text("utf-8"))
            differing = [
                name
                for name, value in self.settings.items()
                if former["settings"].get(name) != value and name not in ("repetitions", "systems")
            ]
            if differing:
                raise ValueError(f"{path} was measured with other {', '.join(differing)}")
            self.cells = former["cells"]

    def has(self, repetition: int, law: str, concurrency: int, system: str) -> bool:
        return cell_key(repetition, law, concurrency, system) in self.cells

    def add(self, repetition: int, law: str, concurrency: int, system: str, cell: Any) -> None:
        self.cells[cell_key(repetition, law, concurrency, system)] = cell
        self._write()

    def save(self) -> dict[str, Any]:
        """Write all cells with their summary; returns the document."""
        return self._write(summary=summarise(self.settings, self.cells))

    def _write(self, **more: Any) -> dict[str, Any]:
        document = {
            "command": " ".join(["python", "-m", "benchmarks.compare", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "settings": self.settings,
            "failures": self.failures,
            **more,
            "cells": self.cells,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Written atomically, so that a run that is interrupted here can be resumed.
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        partial.replace(self.path)
        return document


def measure(
    comparison: Comparison, turns: Turns, asked: Mapping[int, Sequence[Prompt]], laws: Sequence[Law]
) -> None:
    """Measure the missing cells; a system that fails is recorded and skipped."""
    settings = comparison.settings
    for repetition in range(settings["repetitions"]):
        names = settings["systems"]
        start = repetition % len(names)
        for law in laws:
            for name in [*names[start:], *names[:start]]:
                missing = [
                    level
                    for level in settings["concurrency"]
                    if can_run(name, level)
                    and not comparison.has(repetition, law.name, level, name)
                ]
                if not missing or name in comparison.failures:
                    continue
                try:
                    with turns.turn(name) as system:
                        for level in missing:
                            cell = _cell(system, asked[level], settings, law, level, repetition)
                            comparison.add(repetition, law.name, level, name, cell)
                            _progress(repetition, law, level, name, cell)
                except (RuntimeError, OSError) as error:
                    comparison.failures[name] = reason_of(error)
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
    """`path` relative to the repository's root if it is below it."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(ROOT)) if absolute.is_relative_to(ROOT) else path


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    config = json.loads((Path(arguments.target) / "config.json").read_text("utf-8"))
    return {
        "target": arguments.target,
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


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def _laws(text: str) -> list[Law]:
    return [Law.parse(word) for word in _words(text)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = sorted(os.sched_getaffinity(0))
    add = parser.add_argument
    add("--target", required=True, help="checkpoint folder, the same for every system")
    add("--draft", default=str(ROOT / "models" / "demo-draft"), help="the peers' draft model")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--prompts", type=int, default=10, help="per cell; never fewer than run at a time")
    add("--kinds", type=_words, default=list(KINDS), help=f"of {','.join(KINDS)}")
    add("--max-tokens", type=int, default=96)
    add("--systems", type=_words, required=True)
    add("--concurrency", type=_numbers, default=[1, 4, 16, 32])
    add("--laws", type=_laws, default=_laws("greedy,t0.8"))
    add("--repetitions", type=int, default=5)
    add("--cores", type=_numbers, default=cores, help="of every system and of the client")
    add("--config", default="configs/local.yaml", help="ours")
    add("--set", dest="overrides", action="append", default=[], metavar="K=V", help="ours")
    add("--vllm-python", default="", help="an interpreter that has vLLM")
    add("--keep-running", action="store_true")
    add("--resume", action="store_true")
    logs = Path(tempfile.gettempdir()) / "drafthouse-compare"
    add("--logs", type=Path, default=logs, help="folder for what the systems write to stderr")
    add("--out", type=Path, default=OUT / "compare.json")
    return parser


def _prepare(arguments: argparse.Namespace) -> tuple[Comparison, Turns, dict[int, list[Prompt]]]:
    from transformers import AutoTokenizer

    peer_settings = PeerSettings(
        target=arguments.target, draft=arguments.draft, dtype=arguments.dtype,
        cores=tuple(arguments.cores), config=arguments.config,
        overrides=tuple(arguments.overrides), vllm_python=arguments.vllm_python,
        max_sequences=max(arguments.concurrency), log=arguments.logs,
    )  # fmt: skip
    systems = {name: system_of(name, peer_settings) for name in arguments.systems}
    comparison = Comparison(arguments.out, _settings(arguments), resume=arguments.resume)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    asked = prompts_by_concurrency(
        arguments.concurrency, arguments.prompts, tokenizer, arguments.kinds
    )
    return comparison, Turns(systems, keep_running=arguments.keep_running), asked


def main() -> None:
    arguments = _parser().parse_args()
    try:
        comparison, turns, asked = _prepare(arguments)
    except (ValueError, KeyError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    os.sched_setaffinity(0, arguments.cores)
    # Also stops the servers of the current turn and keeps the finished cells.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        measure(comparison, turns, asked, arguments.laws)
    finally:
        turns.stop_all()
        document = comparison.save()
        text = markdown(document)
        arguments.out.with_suffix(".md").write_text(text, "utf-8")
    print(text)
    try:
        picture(document, arguments.out.with_suffix(".png"))
    except RuntimeError as error:
        print(error, file=sys.stderr)
    if comparison.failures:
        raise SystemExit(f"not measured: {', '.join(comparison.failures)}")


if __name__ == "__main__":
    main()
