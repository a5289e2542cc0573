"""Puts other weights in the place of a drafter's while four streams are written.

    python -m benchmarks.faults.swap good [--budget fixed]
    python -m benchmarks.faults.swap poisoned --streams 1

The same questions are answered by SmolLM2-135M-Instruct with one resident draft model.  `good`
exchanges it at a third of the time for a copy (with another hash, so its score begins anew) and
tells how long no draft was accepted, and the tokens per second beside undisturbed runs.  `poisoned`
exchanges it for one whose rows are permuted, and later for the former one again; it tells what that
costs beside no drafts at all, and how many of its trees were scored until the last one was
verified.  Where drafts do not pay the adaptive budget asks for none; the fixed one drafts always.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.support.options import parser_of
from benchmarks.support.record import OUT, ROOT, show_report
from cluster.config.parse import parse
from cluster.config.schema import Config
from cluster.core import Request, SamplingParams, SpeculationOptions
from cluster.in_process import InProcessCluster
from cluster.models.resolve import resolve
from cluster.text.tokenizer import Tokenizer
from cluster.worker.host import load_target_engine
from deployments.questions import QUESTIONS

TARGET = "smollm2-135m-instruct"
DRAFT = ROOT / "models" / "smollm2-135m-draft"
_LOOK_S = 1.0  # as often as a target tells of its scores
_OF_MINUTES = 10.0

# An exchange: when it began and when it was done.
Span = tuple[float, float]


@dataclass(slots=True)
class Run:
    """events: when each came, and its tokens.  looks: the drafter's scores, about once a second.
    texts: by question."""

    began: float
    ended: float = 0.0
    events: list[tuple[float, int]] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)
    exchanged: Span = (0.0, 0.0)
    texts: dict[int, list[int]] = field(default_factory=dict)
    num_verified: int = 0
    num_accepted: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def tokens_per_s(self) -> float:
        return sum(count for _, count in self.events) / self.seconds

    def longest_pause(self, begin: float, end: float) -> float:
        """The longest time in between in which no step of any stream accepted a draft."""
        moments = [begin, *(at for at, count in self.events if count > 1 and begin < at < end), end]
        return max(later - former for former, later in itertools.pairwise(moments))


def options(folder: Path) -> dict[str, Any]:
    return {"engine": {"model": str(folder), "memory_fraction": 0.1}, "context_window": 1024}


def copies(folder: Path) -> dict[str, Path]:
    """The drafter with another hash; and one with the rows of its matrices permuted."""
    found = {name: folder / name for name in ("good", "poisoned")}
    for each in found.values():
        shutil.copytree(DRAFT, each)
        config = each / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "copy_of": DRAFT.name}))
    weights = found["poisoned"] / "model.int8.safetensors"
    rolled = {
        name: tensor.roll(len(tensor) // 2, 0).contiguous() if tensor.dim() == 2 else tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(rolled, weights, {"format": "pt"})
    return found


class Bench:
    """A target with one resident draft model, and streams of questions."""

    def __init__(self, streams: int, questions: int, max_tokens: int, budget: str) -> None:
        document = {
            "coordinator": {"budget": budget, "max_draft_tokens": 8},
            "target": {"engine": {"model": TARGET, "max_context_len": 2048}},
            "drafters": {
                "lm": {"kind": "lm", "placement": {"with": "target"}, "options": options(DRAFT)}
            },
        }
        config = parse(Config, document)
        tokenizer = Tokenizer.load(resolve(TARGET))
        self._prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": question}])
            for question, _ in zip(itertools.cycle(QUESTIONS), range(questions), strict=False)
        ]
        self._streams, self._max_tokens = streams, max_tokens
        self._cluster = InProcessCluster(config, load_target_engine(config))
        self._numbers = itertools.count()

    def put(self, folder: Path) -> Span:
        """Exchange the drafter."""
        began = time.monotonic()
        refused = self._cluster.reconfigure({"drafters": {"lm": {"options": options(folder)}}})
        assert not refused, refused
        return began, time.monotonic()

    def close(self) -> None:
        self._cluster.stop()

    def run(
        self, exchange: Callable[[], Span] | None = None, after: float = 0.0, *, drafts: bool = True
    ) -> Run:
        """Answer all questions.  exchange: made when that share of all tokens is written."""
        run = Run(time.monotonic())
        begins = threading.Event()

        def swap() -> None:
            begins.wait()
            if exchange is not None:
                run.exchanged = exchange()

        swapping = threading.Thread(target=swap)
        swapping.start()
        share = int(after * len(self._prompts) * self._max_tokens)
        self._cluster.run(self._answer_all(run, begins, share, drafts=drafts))
        run.ended = time.monotonic()
        begins.set()
        swapping.join()
        return run

    async def _answer_all(
        self, run: Run, begins: threading.Event, share: int, *, drafts: bool
    ) -> None:
        todo = iter(enumerate(self._prompts))

        async def stream() -> None:
            for index, prompt in todo:  # shared by all streams
                request = Request(
                    f"q{next(self._numbers)}", prompt,
                    SamplingParams(temperature=0.0, max_tokens=self._max_tokens),
                    speculation=SpeculationOptions(enabled=drafts),
                )  # fmt: skip
                run.texts[index] = []
                async for event in self._cluster.coordinator.submit(request):
                    run.events.append((time.monotonic(), len(event.token_ids)))
                    run.texts[index] += event.token_ids.tolist()
                    if event.stats is not None:
                        run.num_verified += event.stats.num_draft_tokens
                        run.num_accepted += event.stats.num_accepted_draft_tokens
                    if sum(map(len, run.texts.values())) >= share:
                        begins.set()

        async def look() -> None:
            while True:
                await asyncio.sleep(_LOOK_S)
                (target,) = self._cluster.coordinator.status()["targets"]
                metrics = self._cluster.coordinator.render_metrics().decode()
                verified = sum(
                    float(line.split()[-1])
                    for line in metrics.splitlines()
                    if line.startswith("drafthouse_draft_tokens_total{")
                )
                run.looks += [
                    {"at_s": round(time.monotonic() - run.began, 1), "version": row["version"],
                     "trees": round(row["trees"]), "verified": verified,
                     "accepted_of_4": round(row["accepted"]["4"], 3)}
                    for row in target.get("scores", ())
                ]  # fmt: skip

        looking = asyncio.create_task(look())
        await asyncio.gather(*(stream() for _ in range(self._streams)))
        looking.cancel()


def equal(first: Run, second: Run) -> str:
    same = sum(first.texts[index] == second.texts[index] for index in first.texts)
    return f"{same} of {len(first.texts)}"


def of_good(bench: Bench, folder: Path) -> dict[str, Any]:
    """Undisturbed, with an exchange, and undisturbed again."""
    runs = [bench.run(), bench.run(lambda: bench.put(folder), 1 / 3), bench.run()]
    before, swapped, after = runs
    loaded, done = swapped.exchanged
    plain = (before.tokens_per_s + after.tokens_per_s) / 2
    lost_s = swapped.seconds - (before.seconds + after.seconds) / 2
    return {
        "tokens per second": [round(each.tokens_per_s, 1) for each in runs],
        "seconds of a run": round(swapped.seconds, 1),
        "of the undisturbed runs": round(swapped.tokens_per_s / plain, 3),
        "of a minute's tokens, by the seconds lost": round(1.0 - lost_s / 60.0, 3),
        "seconds of loading beside, and exchange": round(done - loaded, 2),
        "longest time without an accepted draft, s": {
            "undisturbed": round(before.longest_pause(before.began, before.ended), 2),
            "while loading": round(swapped.longest_pause(loaded, done), 2),
            "from the exchange on": round(swapped.longest_pause(done, swapped.ended), 2),
        },
        "equal texts": equal(before, swapped),
        "acceptance length": [
            round(1 + each.num_accepted / max(len(each.events), 1), 2) for each in runs
        ],
    }


def of_poisoned(bench: Bench, folder: Path) -> dict[str, Any]:
    """With the drafter, without drafts, with the poisoned one from the start, and taken back."""
    drafted, plain = bench.run(), bench.run(drafts=False)
    poisoned = bench.run(lambda: bench.put(folder))
    back = bench.run(lambda: bench.put(DRAFT))
    looks = [each for each in poisoned.looks if each["version"] != drafted.looks[-1]["version"]]
    last = looks[-1]["verified"] if looks else 0.0
    until = next((each for each in looks if each["verified"] >= 0.99 * last), {})
    cost_s = poisoned.seconds - plain.seconds
    return {
        "tokens per second": {
            "with the drafter": round(drafted.tokens_per_s, 1),
            "without drafts": round(plain.tokens_per_s, 1),
            "poisoned": round(poisoned.tokens_per_s, 1),
            "taken back": round(back.tokens_per_s, 1),
        },
        "cost beside no drafts, s": round(cost_s, 2),
        "of ten minutes": round(cost_s / (60 * _OF_MINUTES), 4),
        "verified drafts of the poisoned": poisoned.num_verified,
        "scored trees when the last were verified": until.get("trees"),
        "equal texts": [equal(plain, each) for each in (drafted, poisoned, back)],
        "looks": looks,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("weights", choices=("good", "poisoned"))
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--budget", choices=("adaptive", "fixed"), default="adaptive")
    arguments = parser.parse_args(argv)
    measure = {"good": of_good, "poisoned": of_poisoned}[arguments.weights]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            arguments.streams, arguments.questions, arguments.max_tokens, arguments.budget
        )
        try:
            bench.run()  # prompts are cached and times are known from then on
            report = measure(bench, copies(Path(folder))[arguments.weights])
        finally:
            bench.close()
    name = f"swap_{arguments.weights}{'_fixed' if arguments.budget == 'fixed' else ''}"
    show_report(OUT / f"faults/{name}.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
