"""Puts other weights in the place of a pool drafter's while streams are written, or kills it.

    python -m benchmarks.faults.pool_swap [--streams 32]

The questions of `benchmarks.faults.swap` are answered by SmolLM2-135M-Instruct with one draft model
in a process of its own.  That process runs the deployment that Ray Serve would run, without Serve,
and is told other options as Serve tells it its user_config; target and coordinator are processes
beside it.  At a third of a run's time the model is exchanged for a copy with another hash, and the
longest time in which no step of any stream accepted a draft is told, before, meanwhile and after.
In the last run the process is killed (SIGKILL) while it loads.  Drafts are always asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.faults.swap import DRAFT, TARGET, Run, Span, copies, equal, options
from benchmarks.support.by_hand import complete
from benchmarks.support.options import parser_of
from benchmarks.support.processes import PinnedProcess
from benchmarks.support.record import OUT, show_report
from cluster.config.file import load
from cluster.config.schema import Config
from cluster.core import Request, SamplingParams, SpeculationOptions
from cluster.models.resolve import resolve
from cluster.rpc.channel import connect_coordinator
from cluster.rpc.server import serve_drafter
from cluster.text.tokenizer import Tokenizer
from deployments.drafter import DrafterDeployment
from deployments.questions import QUESTIONS

_NAME = "lm"
_CORES = (0, 1)
_READY, _DONE = " ready: ", "exchanged"
_JOIN_S = 30.0
_KILL_AFTER_S = 0.1  # a load takes several times as long


class Replica(DrafterDeployment):
    """The deployment in a process without Ray."""

    async def begin(self, config: Config) -> None:
        """Do what the deployment's constructor does, as far as it needs no Ray."""
        self._given = self._config = config
        self._name = self._id = _NAME
        self._changing = asyncio.Lock()
        self._refusal = self._change_refused = ""
        self._can_work = False
        self._worker = await self._load(config)
        self._worker.start()
        self._server = await serve_drafter(self)

    async def follow(self) -> None:
        """Tell the address, then exchange the model for that of each folder that stdin names."""
        print(f"{_NAME}{_READY}{self._server.address}", flush=True)
        while folder := (await asyncio.to_thread(sys.stdin.readline)).strip():
            await self.reconfigure({"options": options(Path(folder))})
            print(self._change_refused or _DONE, flush=True)


async def replica(config: Config) -> None:
    found = Replica.__new__(Replica)
    await found.begin(config)
    await found.follow()


class Bench:
    """The processes, and the questions."""

    def __init__(self, folder: Path, streams: int, questions: int, max_tokens: int) -> None:
        config, log = folder / "config.yaml", folder / "log"
        drafter = {"kind": "lm", "options": options(DRAFT), "placement": {"num_cpus": 0.1}}
        arguments = {
            "coordinator": {"budget": "fixed", "max_draft_tokens": 8, "keep_learned": False},
            "target": {"engine": {"model": TARGET, "max_context_len": 2048}},
            "drafters": {_NAME: drafter},
        }
        application = {"name": "a", "import_path": "deployments.app:build", "args": arguments}
        config.write_text(yaml.safe_dump({"applications": [application]}))
        self._processes: list[PinnedProcess] = []

        def start(module: str, *words: str) -> tuple[PinnedProcess, str]:
            command = [sys.executable, "-m", module, *words]
            process = PinnedProcess(command, _CORES, log)
            self._processes.append(process)
            while True:
                _, separator, address = process.read_line().partition(_READY)
                if separator:
                    return process, address.strip()

        _, target = start("cluster.worker", "target", str(config))
        self._drafter, listening = start("benchmarks.faults.pool_swap", "--replica", str(config))
        words = ("--target", target, "--drafter", f"{_NAME}={listening}")
        _, self._address = start("cluster.lead", str(config), *words)
        tokenizer = Tokenizer.load(resolve(TARGET))
        self._prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": question}])
            for question, _ in zip(itertools.cycle(QUESTIONS), range(questions), strict=False)
        ]
        self._streams, self._max_tokens = streams, max_tokens
        asyncio.run(self._wait_until_joined())

    def exchange(self, folder: Path) -> Span:
        began = time.perf_counter()
        self._drafter.write_line(str(folder))
        answer = self._drafter.read_line()
        assert answer == _DONE, answer
        return began, time.perf_counter()

    def kill_while_loading(self, folder: Path) -> Span:
        began = time.perf_counter()
        self._drafter.write_line(str(folder))
        time.sleep(_KILL_AFTER_S)
        self._drafter.kill()
        return began, time.perf_counter()

    def close(self) -> None:
        for process in reversed(self._processes):
            process.stop()

    def run(self, disturb: Callable[[], Span] | None = None, after_s: float = 0.0) -> Run:
        """Answer all questions.  disturb: called after that time, in a thread of its own."""
        return asyncio.run(self._run(disturb, after_s))

    async def _run(self, disturb: Callable[[], Span] | None, after_s: float) -> Run:
        params = SamplingParams(temperature=0.0, max_tokens=self._max_tokens)
        requests = [
            Request(str(index), prompt, params, speculation=SpeculationOptions())
            for index, prompt in enumerate(self._prompts)
        ]
        _, link = await connect_coordinator(self._address)
        run = Run(time.perf_counter())

        async def later() -> None:
            await asyncio.sleep(after_s)
            if disturb is not None:
                run.exchanged = await asyncio.to_thread(disturb)

        disturbing = asyncio.create_task(later())
        result = await complete(link, requests, self._streams)
        run.ended = time.perf_counter()
        await disturbing
        await link.close()
        for index, answer in enumerate(result.answers):
            counts = [0, *(count for _, count in answer.events)]
            steps = (later - former for former, later in itertools.pairwise(counts))
            run.events += zip((at for at, _ in answer.events), steps, strict=True)
            run.texts[index] = list(answer.token_ids)
        run.events.sort()
        if result.acceptance is not None:
            run.num_accepted = round(result.acceptance.accepted)
        return run

    async def _wait_until_joined(self) -> None:
        deadline = time.monotonic() + _JOIN_S
        _, link = await connect_coordinator(self._address)
        while not (status := await link.status())["targets"] or not status["drafters"]:
            if time.monotonic() > deadline:
                raise RuntimeError("not all processes have joined")
            await asyncio.sleep(0.05)
        await link.close()


def report_of(bench: Bench, folder: Path) -> dict[str, Any]:
    bench.run()  # prompts are cached and times are known from then on
    before = bench.run()
    swapped = bench.run(lambda: bench.exchange(folder), before.seconds / 3)
    after = bench.run()
    killed = bench.run(lambda: bench.kill_while_loading(DRAFT), before.seconds / 3)
    loaded, done = swapped.exchanged
    plain = (before.tokens_per_s + after.tokens_per_s) / 2
    return {
        "tokens per second": [round(each.tokens_per_s, 1) for each in (before, swapped, after)],
        "seconds of a run": round(swapped.seconds, 1),
        "of the undisturbed runs": round(swapped.tokens_per_s / plain, 3),
        "seconds of loading beside, and exchange": round(done - loaded, 2),
        "longest time without an accepted draft, s": {
            "undisturbed": round(before.longest_pause(before.began, before.ended), 2),
            "while loading": round(swapped.longest_pause(loaded, done), 2),
            "from the exchange on": round(swapped.longest_pause(done, swapped.ended), 2),
        },
        "equal texts": equal(before, swapped),
        "killed while loading": {
            "equal texts": equal(before, killed),
            "longest time without a token of any stream, s": round(
                max(later - at for (at, _), (later, _) in itertools.pairwise(killed.events)), 2
            ),
        },
        "acceptance length": [
            round(1 + each.num_accepted / max(len(each.events), 1), 2)
            for each in (before, swapped, after, killed)
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--replica", metavar="CONFIG", help="be the drafter's process")
    arguments = parser.parse_args(argv)
    if arguments.replica:
        asyncio.run(replica(load(arguments.replica, ()).config))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        good = copies(folder)["good"]
        bench = Bench(folder, arguments.streams, arguments.questions, arguments.max_tokens)
        try:
            report = report_of(bench, good)
        finally:
            bench.close()
    show_report(OUT / f"faults/pool_swap_{arguments.streams}.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
