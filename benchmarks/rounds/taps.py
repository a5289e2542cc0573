"""Measures the cost of taps (hidden states for draft heads) as a share of a step.

    python -m benchmarks.rounds.taps --model smollm2-135m-instruct

Each pair is a step with EAGLE-3's three taps and the final norm's output, and the same step without
them; the order alternates.  Cells are decoding steps by requests and draft nodes, and a chunk of a
prompt.  Reports the median over pairs of the ratio of step times, with its 95 % bootstrap interval.

Bar: at most 1.02 in every cell.  Exit status 1 if missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.support.record import OUT, show_report
from cluster.config.schema import EngineConfig
from cluster.core import EMPTY_TREE, TokenTree, token_array
from cluster.engine.cpu.threads import configure_threads
from cluster.engine.engine import Engine, Work

_MOST = 1.02
_CONTEXT_LEN = 256
# The first steps of a kind allocate memory.
_WARM_UP_PAIRS = 5
_DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class Cell:
    """A step by its requests and the draft nodes of each; new_tokens: those that each appends."""

    requests: int
    nodes: int
    new_tokens: int = 1

    def works(self, vocab_size: int) -> Iterator[Work]:
        """Yield works that roll the requests back and run them again from there."""
        tokens = token_array(4 + np.arange(self.new_tokens) % (vocab_size - 4))
        chain = TokenTree.of(4 + np.arange(self.nodes), np.arange(self.nodes) - 1)
        for index in range(self.requests):
            yield Work(str(index), _CONTEXT_LEN, tokens, chain if self.nodes else EMPTY_TREE)


CELLS = (Cell(1, 0), Cell(1, 8), Cell(4, 8), Cell(16, 4), Cell(32, 0), Cell(1, 0, new_tokens=256))


def measure(engine: Engine, cell: Cell, taps: Sequence[int], num_pairs: int) -> dict[str, Any]:
    """Measure one cell: its times in milliseconds, and their ratio."""
    vocab_size = engine.vocab_size
    for index in range(cell.requests):
        # Texts that differ from their beginning share no pages.
        prompt = 4 + (np.arange(_CONTEXT_LEN) * 7919 + index) % (vocab_size - 4)
        _run(engine, [Work(str(index), 0, token_array(prompt))], ())
    times: list[tuple[float, float]] = []
    for pair in range(_WARM_UP_PAIRS + num_pairs):
        order = ((), taps) if pair % 2 else (taps, ())
        found = {asked: _run(engine, list(cell.works(vocab_size)), asked) for asked in order}
        times.append((found[taps], found[()]))
    for index in range(cell.requests):
        engine.release(str(index))
    kept = np.array(times[_WARM_UP_PAIRS:])
    ratios = kept[:, 0] / kept[:, 1]
    drawn = np.random.default_rng(0).choice(ratios, (_DRAWS, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    with_ms, without_ms = 1000 * np.median(kept, axis=0)
    return {
        "requests": cell.requests,
        "nodes": cell.nodes,
        "new_tokens": cell.new_tokens,
        "pairs": len(ratios),
        "with_taps_ms": round(float(with_ms), 3),
        "without_ms": round(float(without_ms), 3),
        "ratio": round(float(np.median(ratios)), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
    }


def _run(engine: Engine, works: Sequence[Work], taps: Sequence[int]) -> float:
    """Run the works; returns the seconds of their steps."""
    for work in works:
        engine.submit(work)
    seconds = 0.0
    while engine.has_pending:
        for output in engine.step(taps):
            if output.logits is None:
                raise SystemExit(f"the engine refused a step: {output.error or output.have_len}")
        seconds += engine.last_step.step_time_s
    return seconds


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return EAGLE-3's taps and the final norm's output."""
    return (2, num_layers // 2, num_layers - 3, num_layers)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=200)
    arguments = parser.parse_args(argv)
    config = EngineConfig(
        model=arguments.model, dtype=arguments.dtype, threads=arguments.threads,
        max_context_len=1024, max_batch_tokens=512,
    )  # fmt: skip
    configure_threads(config)
    engine = Engine.load(config)
    taps = default_taps(len(engine.layers))
    engine.capture_ahead(taps)
    cells = [measure(engine, cell, taps, arguments.pairs) for cell in CELLS]
    report = {
        "model": arguments.model,
        "device": str(engine.device),
        "dtype": str(engine.layers[0].dtype),
        "taps": taps,
        "bar": _MOST,
        "cells": cells,
    }
    show_report(OUT / "rounds" / "taps.json", report)
    return 0 if all(cell["ratio"] <= _MOST for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
