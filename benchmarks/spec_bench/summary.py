"""What the answers say: rates, ratios to plain decoding with intervals, acceptance by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.answers import Answer, rate_at_level
from benchmarks.spec_bench.client import Turn
from benchmarks.spec_bench.plan import OURS, PLAIN

ALL = "all"
_DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Cell:
    """Answers of one system at one level and law: turns by run."""

    system: str
    law: str
    concurrency: int
    runs: tuple[tuple[Turn, ...], ...]
    num_refused: int = 0

    @property
    def turns(self) -> list[Turn]:
        return [turn for run in self.runs for turn in run]


def summarise(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One record per law, level and system, with its tasks.  runs: as `Record` keeps them."""
    records = []
    for law in settings["laws"]:
        for level in settings["concurrency"]:
            cells = {
                system: cell
                for system in settings["systems"]
                if (cell := _cell(system, law, level, runs)).turns
            }
            for system, cell in cells.items():
                records.append(_record(cell, cells.get(PLAIN), cells.get(_peer_plain(system))))
    return records


def _peer_plain(system: str) -> str:
    return PLAIN if system in (OURS, PLAIN) else "vllm-plain"


def _cell(system: str, law: str, level: int, runs: Mapping[str, Any]) -> Cell:
    blocks = [
        block
        for run in runs.values()
        for block in run["blocks"]
        if (block["system"], run["law"], block["concurrency"]) == (system, law, level)
    ]
    turns = tuple(tuple(Turn.of(turn) for turn in block["turns"]) for block in blocks)
    return Cell(system, law, level, turns, sum(len(block["refused"]) for block in blocks))


def _record(cell: Cell, plain: Cell | None, own_plain: Cell | None) -> dict[str, Any]:
    tasks = list(dict.fromkeys(turn.task for turn in cell.turns))
    return {
        "system": cell.system,
        "law": cell.law,
        "concurrency": cell.concurrency,
        "answers": len(cell.turns),
        "refused": cell.num_refused,
        "tokens_per_s": throughput(cell),
        "stream_tokens_per_s": stream_rate(cell.turns),
        "ttft_p50_ms": float(
            np.median([1e3 * (turn.first_s - turn.submitted_s) for turn in cell.turns])
        ),
        "mean_answer_tokens": float(np.mean([turn.num_tokens for turn in cell.turns])),
        # To our own plain decoding, and for a peer to its own plain mode too.
        "to_plain": _ratios(cell, plain, tasks),
        "to_own_plain": _ratios(cell, own_plain, tasks),
        "acceptance_length": {
            task: acceptance_length(_of(cell.turns, task)) for task in (ALL, *tasks)
        },
        "drafted_share": _share_drafted(cell.turns),
    }


def _ratios(cell: Cell, plain: Cell | None, tasks: Sequence[str]) -> dict[str, Any] | None:
    if plain is None or plain.system == cell.system:
        return None
    return {task: ratio(_of(cell.turns, task), _of(plain.turns, task)) for task in (ALL, *tasks)}


def _of(turns: Sequence[Turn], task: str) -> list[Turn]:
    return [turn for turn in turns if task in (ALL, turn.task)]


def throughput(cell: Cell) -> float:
    """Tokens per second while `concurrency` answers were under way, prefills included; the mean
    over runs."""
    rates = []
    for turns in cell.runs:
        answers = [
            Answer(turn.submitted_s, ((turn.first_s, 1), (turn.last_s, turn.num_tokens)), ())
            for turn in turns
            if turn.num_tokens > 1
        ]
        if answers:
            level = min(cell.concurrency, len(answers))
            rates.append(rate_at_level(answers, level, from_submission=True))
    return float(np.mean(rates)) if rates else 0.0


def stream_rate(turns: Sequence[Turn]) -> float:
    """Tokens per second as one client sees them: all decoded tokens by all decode seconds."""
    seconds = sum(turn.decode_s for turn in turns)
    return sum(turn.decode_tokens for turn in turns) / seconds if seconds else 0.0


def ratio(above: Sequence[Turn], below: Sequence[Turn]) -> dict[str, float] | None:
    """The quotient of two stream rates with its 95 % interval; None where one has no tokens.

    Questions are resampled, the same ones on both sides: every question is answered both ways, and
    how hard it is concerns both alike.
    """
    ids = sorted({turn.question_id for turn in above} & {turn.question_id for turn in below})
    tables = [_table(turns, ids) for turns in (above, below)]
    if not ids or any(table.sum(axis=0).min() <= 0.0 for table in tables):
        return None
    chosen = np.random.default_rng(0).integers(0, len(ids), (_DRAWS, len(ids)))
    rates = [_rates(table, np.arange(len(ids))[None]) for table in tables]
    drawn = [_rates(table, chosen) for table in tables]
    low, high = np.nanpercentile(drawn[0] / drawn[1], [2.5, 97.5])
    return {
        "value": float(rates[0][0] / rates[1][0]),
        "low": float(low),
        "high": float(high),
        "questions": len(ids),
    }


def _table(turns: Sequence[Turn], ids: Sequence[int]) -> Any:
    """float64[questions, 2]: decoded tokens and decode seconds of each question."""
    places = {question_id: place for place, question_id in enumerate(ids)}
    table = np.zeros((len(ids), 2))
    for turn in turns:
        if turn.question_id in places:
            table[places[turn.question_id]] += (turn.decode_tokens, turn.decode_s)
    return table


def _rates(table: Any, chosen: Any) -> Any:
    """float64[draws]: tokens per second over the chosen questions, int[draws, questions]."""
    sums = table[chosen].sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums[:, 0] / sums[:, 1]


def acceptance_length(turns: Sequence[Turn]) -> float | None:
    """Tokens per step that verified drafts, as vLLM defines it; None where there was none."""
    steps = sum(turn.steps for turn in turns)
    return 1.0 + sum(turn.accepted for turn in turns) / steps if steps else None


def _share_drafted(turns: Sequence[Turn]) -> float:
    """Share of the answers that had a draft verified at all."""
    return float(np.mean([turn.steps > 0 for turn in turns]))
