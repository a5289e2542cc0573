"""Measures how much slower than plain decoding speculation can be.

    python -m benchmarks.never_slower                                  half an hour and more
    python -m benchmarks.never_slower --cells 'normal/code/greedy/*' --pairs 2 --max-tokens 16 \
        --out /tmp/never-slower.json                                     minutes

A cell is STACK/KIND/LAW/CONCURRENCY: drafters, kind of prompts, sampling setting, and
number of concurrent requests.

  normal    the configured drafters, each request with those of its task
  random    one drafter that drafts random tokens; sleeper: one that answers half a second late;
            residents of the target, and as pool-random and pool-sleeper drafters of the pool
  control   no drafters; only measured if --stacks names it

Each cell is measured in pairs with plain decoding: the same prompts and seeds in a second set of
processes (target and coordinator).  One set is stopped (SIGSTOP) while the other runs.  The order
alternates, and the pairs of a cell are spread over time.  After --turn pairs per cell all processes
are restarted, because the memory layout of a process changes its speed by about a percent;
`control` measures this effect.  No prompt is used twice within a stack, so a drafter that learns
from past text has not seen the text that it is measured with.

The same command goes on where it was interrupted.  Exit status 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.never_slower.figures import CONTROL, Cell, summarise
from benchmarks.never_slower.report import markdown
from benchmarks.never_slower.runs import PlainAndRival, PromptSets, measure
from benchmarks.support.answers import Law
from benchmarks.support.by_hand import Ours, Setup
from benchmarks.support.options import (
    DEMO_TARGET,
    add_config_options,
    add_options,
    numbers,
    parser_of,
)
from benchmarks.support.processes import exit_on_sigterm
from benchmarks.support.record import OUT, ROOT, Record
from cluster.config.file import load

KINDS = ("code", "prose", "random")
STACKS = ("normal", "random", "sleeper", "pool-random", "pool-sleeper")

_POOL = "pool-"
_WORTHLESS = {
    "random": "benchmarks.never_slower.drafters:RandomDrafter",
    "sleeper": "benchmarks.never_slower.drafters:SleepingDrafter",
}


def cells_of(settings: Mapping[str, Any], stacks: Sequence[str], patterns: str) -> list[Cell]:
    """The cells whose key matches one of the patterns; raises ValueError if none does."""
    grid = [
        Cell(stack, kind, law, concurrency)
        for stack in stacks
        for kind in KINDS
        for law in settings["laws"]
        for concurrency in settings["concurrency"]
    ]
    words = patterns.split(",")
    chosen = [cell for cell in grid if any(fnmatch.fnmatch(cell.key, word) for word in words)]
    if not chosen:
        raise ValueError(f"no cell fits {patterns!r}; they are STACK/KIND/LAW/CONCURRENCY")
    return chosen


def setup_of(stack: str, settings: Mapping[str, Any], log: Path, *, plain: bool = False) -> Setup:
    """Return the settings for a stack's processes; plain: for those of its comparison."""
    cores, target_cores = tuple(settings["cores"]), None
    if settings["target_cores"]:
        target_cores = tuple(settings["target_cores"])
        cores = tuple(core for core in cores if core not in target_cores)
    start = partial(
        Setup, config=settings["config"], log=log, cores=cores, target_cores=target_cores
    )
    overrides = [
        f"target.engine.model={settings['model']}",
        f"target.engine.threads={len(target_cores or cores)}",
        *settings["overrides"],
    ]
    if plain or stack == CONTROL:
        return start(overrides=tuple(overrides), drafters=())
    name = stack.removeprefix(_POOL)
    if name in _WORTHLESS:
        overrides.append(f"drafters.{name}.kind={_WORTHLESS[name]}")
        overrides.append(f"drafters.{name}.options.vocab_size={settings['vocab_size']}")
        if target_cores or stack != name:
            overrides.append(f"drafters.{name}.placement.cores={list(cores)}")
        return start(overrides=tuple(overrides), drafters=(name,))
    names = tuple(load(settings["config"], overrides).config.drafters)
    return start(overrides=tuple(overrides), drafters=names, by_task=True)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_options(
        parser,
        model=(str(DEMO_TARGET.relative_to(ROOT)), "the target's checkpoint"),
    )
    add_config_options(parser)
    add_options(
        parser,
        stacks=list(STACKS),
        cells=("*", "patterns of cells, e.g. 'normal/code/*,*/random/greedy/1'"),
        laws=["greedy", "t1"],
        concurrency=[1, 4, 16, 32],
        pairs=(6, "per cell"),
    )
    about = "no further pairs for a stack whose mean is known within this share"
    add_options(
        parser,
        until=(0.02, about),
        turn=(3, "pairs per cell until all processes start anew"),
        prompts=(4, "per run; never fewer than run at a time"),
        max_tokens=64,
        cores=(sorted(os.sched_getaffinity(0)), "of everything"),
    )
    about = "of the target alone; the drafters, in the pool, and all else have the other --cores"
    add("--target-cores", type=numbers, default=[], help=about)
    add_options(
        parser,
        fresh=(False, "forget what was measured before"),
    )
    logs = Path(tempfile.gettempdir()) / "drafthouse-never-slower"
    add_options(
        parser,
        logs=(logs, "folder for what the processes write to stderr"),
        out=OUT / "never_slower" / "never_slower.json",
    )
    return parser


_SETTINGS = (
    "model",
    "config",
    "overrides",
    "laws",
    "concurrency",
    "pairs",
    "until",
    "turn",
    "prompts",
    "max_tokens",
    "cores",
    "target_cores",
)


def main() -> int:
    from transformers import AutoTokenizer

    arguments = _parser().parse_args()
    settings = {name: getattr(arguments, name) for name in _SETTINGS}
    try:
        laws = {name: Law.parse(name) for name in arguments.laws}
        cells = cells_of(settings, arguments.stacks, arguments.cells)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        shape = json.loads((Path(arguments.model) / "config.json").read_text("utf-8"))
        settings["vocab_size"] = min(len(tokenizer), shape["vocab_size"])
        record = Record(arguments.out, settings, free=("pairs", "until"), fresh=arguments.fresh)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    library = PromptSets(settings, tokenizer)

    def processes_of(stack: str) -> PlainAndRival:
        log = arguments.logs / stack
        plain = Ours(setup_of(stack, settings, log / "plain", plain=True))
        return PlainAndRival(plain, Ours(setup_of(stack, settings, log / "ours")))

    others = set(arguments.cores) - set(arguments.target_cores)
    os.sched_setaffinity(0, others or arguments.cores)
    exit_on_sigterm()
    try:
        measure(record, cells, laws, library, processes_of)
    finally:
        document = record.publish(summarise(record.results))
        text = markdown(document)
        arguments.out.with_suffix(".md").write_text(text, "utf-8")
    print(text)
    return 1 if record.failures or document["summary"]["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
