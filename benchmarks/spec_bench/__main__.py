"""Measures the gain of speculation on real questions: ours with and without it, and its peers.

    python -m benchmarks.spec_bench QUESTIONS.jsonl
    python -m benchmarks.spec_bench QUESTIONS.jsonl --questions-per-category 2 --max-tokens 16 \\
        --concurrency 1 --laws greedy                                          a small run
    python -m benchmarks.spec_bench QUESTIONS.jsonl --peer vllm-plain,vllm-suffix,llama-plain \\
        --vllm-python ../peer/bin/python --llama-server ../llama-server --gguf ../model.gguf

    python -m benchmarks.spec_bench --held-out 40 --peer vllm-plain,openvino-plain ...

QUESTIONS.jsonl is a file in Spec-Bench's form; none comes with this repository.  Every question is
asked once in the life of a server (`benchmarks/spec_bench/plan.py`), unless --seen says otherwise.
Ours is asked over HTTP; llama.cpp over HTTP by the same client, OpenVINO in process, where it has
both cores to itself, and vLLM either way.

The same command goes on where it was interrupted.  Exit status 1 if a server failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks.spec_bench.asking import HTTP, IN_PROCESS, WAYS, answer, peer_name
from benchmarks.spec_bench.peers.makers import (
    DRAFT_TOKENS,
    PEERS,
    TITLES,
    add_program_options,
    maker_and_mode,
    programs_of,
)
from benchmarks.spec_bench.plan import OURS, PLAIN, Run, plan, short_blocks
from benchmarks.spec_bench.questions import Question, held_out, limit, load
from benchmarks.spec_bench.report import markdown
from benchmarks.spec_bench.servers import Setup
from benchmarks.spec_bench.summary import summarise
from benchmarks.support.options import (
    add_config_options,
    add_options,
    laws,
    parser_of,
    words,
)
from benchmarks.support.processes import exit_on_sigterm
from benchmarks.support.prompts import KINDS
from benchmarks.support.record import OUT, Record, reason_of
from cluster.config.file import load as load_config
from cluster.errors import ConfigError
from cluster.models.fingerprint import load_pretrained_tokenizer
from cluster.models.resolve import resolve

# vLLM recompiles its model for another limit; with this minimum, a small run shares the compiled
# model of a large one.
_MIN_SEQUENCES = 32
_WAYS = {"http": HTTP, "in-process": IN_PROCESS}


def measure(record: Record, runs: Sequence[Run], setup: Setup, max_tokens: int) -> None:
    """Measure the missing runs; a server that fails is recorded and skipped from then on."""
    missing = [run for run in runs if run.key not in record.results]
    total = sum(len(block.questions) for run in missing for block in run.blocks)
    with tqdm(total=total, unit="question", smoothing=0.1) as bar:
        for run in missing:
            if run.server in record.failures:
                continue
            bar.set_postfix_str(f"{run.server}, {run.law.name}")
            try:
                blocks = answer(run, setup, max_tokens, bar.update)
                record.add(run.key, {"law": run.law.name, "blocks": blocks})
            except (RuntimeError, OSError, httpx.HTTPError) as error:
                record.failures[run.server] = reason_of(error)
                tqdm.write(f"{run.server} failed and is left out: {error}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("questions", type=Path, metavar="QUESTIONS.jsonl", nargs="?")
    about = "instead of questions, so many held-out texts to be continued by --max-tokens tokens"
    add("--held-out", type=int, default=0, metavar="N", help=about)
    add_options(
        parser,
        kinds=(list(KINDS), f"of them: {','.join(KINDS)}"),
    )
    add("--seen", type=int, default=0, metavar="N", help="ask all so often before it counts")
    add_config_options(parser, "configs/local.yaml")
    add("--laws", type=laws, default=laws("greedy,t0.7"))
    add_options(
        parser,
        concurrency=[1, 4, 16, 32],
    )
    add("--questions-per-category", type=int, metavar="N", help="default: all")
    add_options(
        parser,
        max_tokens=128,
        rounds=(1, "more rounds ask each level more of the questions"),
    )
    add("--peer", type=words, default=[], help=f"of {','.join(PEERS)}")
    add_options(
        parser,
        ways=(list(_WAYS), f"to ask it: {','.join(_WAYS)}"),
    )
    add_program_options(parser)
    about = "vLLM's, where the target's folder has weights in a form that only ours reads"
    add_options(
        parser,
        vllm_model=("", about),
        draft=("", "of vLLM's mode draft a model, of eagle3 a head"),
        dtype=("bfloat16", "vLLM's"),
        max_context_len=(4096, "the peers'"),
        port=(8155, "the peers'"),
        logs=Path(tempfile.gettempdir()) / "drafthouse-spec-bench",
        fresh=(False, "forget what was measured before"),
        out=OUT / "spec_bench" / "spec_bench.json",
    )
    return parser


def _questions(arguments: argparse.Namespace, model: str) -> list[Question]:
    if (arguments.questions is None) == (not arguments.held_out):
        raise ValueError("name a file of questions, or the number of --held-out texts")
    if arguments.questions:
        return limit(load(arguments.questions), arguments.questions_per_category)
    tokenizer = load_pretrained_tokenizer(resolve(model))
    return held_out(arguments.held_out, arguments.kinds, tokenizer)


def _prepare(arguments: argparse.Namespace) -> tuple[Record, list[Run], Setup]:
    if unknown := [word for word in arguments.ways if word not in _WAYS]:
        raise ValueError(f"--ways: no {unknown[0]!r}; there are {', '.join(_WAYS)}")
    programs = programs_of(arguments)
    wanted = [maker_and_mode(name) for name in arguments.peer]
    versions = {TITLES[maker]: programs.version_of(maker) for maker, _ in wanted}
    config = load_config(arguments.config, arguments.overrides).config
    questions = _questions(arguments, config.target.engine.model)
    peers = [
        peer_name(maker, mode, _WAYS[way])
        for way in arguments.ways
        for maker, mode in wanted
        if _WAYS[way] in WAYS[maker]
    ]
    if any(name.endswith(IN_PROCESS) for name in peers) and any(each.request for each in questions):
        raise ValueError("questions with a `request` cannot be asked in process: use --ways http")
    runs = plan(
        questions, arguments.laws, arguments.concurrency, peers, arguments.rounds, arguments.seen
    )
    settings: dict[str, Any] = {
        "file": arguments.questions.name if arguments.questions else "models/heldout.jsonl",
        "seen": arguments.seen,
        "questions": len(questions),
        "config": arguments.config,
        "overrides": arguments.overrides,
        "model": Path(config.target.engine.model).name,
        "drafters": list(config.drafters),
        "laws": [law.name for law in arguments.laws],
        "concurrency": arguments.concurrency,
        "rounds": arguments.rounds,
        "max_tokens": arguments.max_tokens,
        "systems": [PLAIN, OURS, *peers],
        "notes": short_blocks(runs),
    }
    settings["peers"] = versions
    settings["draft_tokens"] = {
        f"{TITLES[maker]} {mode}": DRAFT_TOKENS[maker][mode] for maker, mode in wanted
    }
    model = arguments.vllm_model or (str(resolve(config.target.engine.model)) if peers else "")
    setup = Setup(
        arguments.config,
        tuple(arguments.overrides),
        model,
        arguments.draft,
        arguments.dtype,
        programs,
        max(_MIN_SEQUENCES, *arguments.concurrency),
        arguments.max_context_len,
        arguments.port,
        arguments.logs,
    )
    # Peers may be added to a record that was measured without them, and stay in the report.
    free = ("systems", "peers", "draft_tokens")
    record = Record(arguments.out, settings, free=free, fresh=arguments.fresh)
    known = [block["system"] for run in record.results.values() for block in run["blocks"]]
    record.settings["systems"] = list(dict.fromkeys([*settings["systems"], *known]))
    return record, runs, setup


def main() -> None:
    arguments = _parser().parse_args()
    try:
        record, runs, setup = _prepare(arguments)
    except (ValueError, OSError, ConfigError) as error:
        raise SystemExit(f"error: {error}") from error
    for note in record.settings["notes"]:
        print(note, file=sys.stderr)
    exit_on_sigterm()
    try:
        measure(record, runs, setup, arguments.max_tokens)
    finally:
        document = record.publish(summarise(record.settings, record.results))
        text = markdown(document)
        arguments.out.with_suffix(".md").write_text(text, "utf-8")
    print(text)
    if record.failures:
        raise SystemExit(f"not measured: {', '.join(record.failures)}")


if __name__ == "__main__":
    main()
