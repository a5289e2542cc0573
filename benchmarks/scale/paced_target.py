"""A target that computes nothing, as a process: `python -m benchmarks.scale.paced_target`.

The text is fixed: the token at position p is p modulo a number.  It makes a step of all texts of
each coordinator at a fixed pace, so whoever passes its tokens on is measured at a known load.
Everything that depends only on the position is computed once.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import numpy as np
import uvloop

from benchmarks.support.options import add_options, parser_of
from cluster.core import FinishReason, TokenArray
from cluster.plan.texts import NO_SOURCES
from cluster.rpc.link import Link, run_until_first_ends
from cluster.rpc.messages import (
    Load,
    Open,
    StepFrame,
    StepReport,
    TextName,
    TextVerdict,
    VerdictFrame,
    WorkerDescription,
)
from cluster.rpc.server import run_until_signal, serve_worker

MAX_SEQUENCES = 4096
LOOK_UP = "suffix"
# Of a text with drafts: two of eight are accepted.
TOKENS_PER_STEP, _NUM_NODES = 3, 8
_VOCABULARY = 1023
_NO_LIMIT = 1 << 20
# What it reports; a step takes next to nothing.
_STEP_S = 0.02
_SOURCES = np.ones(TOKENS_PER_STEP - 1, dtype=np.uint32)


def text(start: int, count: int) -> TokenArray:
    """The tokens at positions [start, start + count)."""
    return np.arange(start, start + count, dtype=np.int32) % _VOCABULARY


_TEXTS = [text(start, TOKENS_PER_STEP) for start in range(_VOCABULARY)]


class _Texts:
    """The texts of one coordinator."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._opened: dict[TextName, Open] = {}
        self._lengths: dict[TextName, int] = {}
        self._serial = 0

    async def serve(self, link: Link[VerdictFrame, StepFrame]) -> None:
        await run_until_first_ends(self._read(link), self._step_forever(link))

    async def _read(self, link: Link[VerdictFrame, StepFrame]) -> None:
        async for frame in link:
            for name in frame.cancels:
                self._lengths.pop(name, None)
                self._opened.pop(name, None)
            for opened in frame.opens:
                name = TextName(opened.request_id, opened.generation)
                self._lengths[name], self._opened[name] = len(opened.token_ids), opened

    async def _step_forever(self, link: Link[VerdictFrame, StepFrame]) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._period_s, loop.time())
            await asyncio.sleep(due - loop.time())
            if self._lengths:
                await link.send(self._step())

    def _step(self) -> VerdictFrame:
        self._serial += 1
        verdicts = tuple(map(self._verdict, list(self._lengths)))
        report = StepReport(
            _STEP_S,
            0.9 * _STEP_S,
            num_sequences=len(verdicts),
            num_nodes=sum(verdict.num_nodes for verdict in verdicts),
            pages_in_use=1,
            pages_total=_NO_LIMIT,
        )
        return VerdictFrame(verdicts, report=report, serial=self._serial)

    def _verdict(self, name: TextName) -> TextVerdict:
        length, opened = self._lengths[name], self._opened[name]
        is_drafted = len(opened.drafters) > 0
        emitted = _TEXTS[length % _VOCABULARY][: None if is_drafted else 1]
        emitted = emitted[: opened.max_len - length]
        self._lengths[name] = length + len(emitted)
        is_over = self._lengths[name] >= opened.max_len
        if is_over:
            del self._lengths[name], self._opened[name]
        reason = FinishReason.LENGTH if is_over else None
        if not is_drafted:
            return TextVerdict(
                name.request_id, name.generation, length, emitted, NO_SOURCES, finish_reason=reason
            )
        return TextVerdict(
            name.request_id,
            name.generation,
            length,
            emitted,
            _SOURCES,
            (0,) * len(_SOURCES),
            _NUM_NODES,
            (_NUM_NODES,),
            (_NUM_NODES,),
            finish_reason=reason,
        )


class PacedTarget:
    """Serves any number of coordinators."""

    def __init__(self, period_s: float, *, is_drafted: bool) -> None:
        """is_drafted: a step emits three tokens of each text instead of one."""
        self._period_s = period_s
        self._residents = (LOOK_UP,) if is_drafted else ()

    def describe(self, max_sequences: int = MAX_SEQUENCES) -> WorkerDescription:
        return WorkerDescription(
            "null-target",
            "target",
            "null",
            vocab_size=_VOCABULARY,
            max_context_len=_NO_LIMIT,
            max_running_sequences=max_sequences,
            max_batch_tokens=_NO_LIMIT,
            residents=self._residents,
        )

    async def serve(self, link: Link[VerdictFrame, StepFrame]) -> None:
        await link.send(VerdictFrame(load=Load(seats=MAX_SEQUENCES)))
        await _Texts(self._period_s).serve(link)


async def _serve(arguments: argparse.Namespace) -> None:
    target = PacedTarget(1e-3 * arguments.period_ms, is_drafted=arguments.drafted)
    server = await serve_worker(target, "127.0.0.1", 0)
    await run_until_signal(server, "target")


def main() -> int:
    parser = parser_of(__doc__)
    add_options(
        parser,
        period_ms=40.0,
        drafted=False,
    )
    uvloop.run(_serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
