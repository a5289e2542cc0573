"""Summarises answers: rates, ratios to plain decoding with intervals, acceptance by category."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.spec_bench.client import Turn
from benchmarks.spec_bench.plan import OURS, PLAIN
from benchmarks.support.answers import Answer, rate_at_level
from cluster.records import frozen

ALL = "all"
_DRAWS = 2000

Estimate = dict[str, Any]
Work = Callable[[Turn], tuple[float, float]]


def decoded(turn: Turn) -> tuple[float, float]:
    """(tokens, seconds) of the decoding of an answer."""
    return turn.decode_tokens, turn.decode_s


def whole(turn: Turn) -> tuple[float, float]:
    """(tokens, seconds) of an answer from its submission on."""
    return turn.num_tokens, turn.last_s - turn.submitted_s


@frozen
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
    """One record per law, level and system.  runs: law and blocks, by the key of their run."""
    records = []
    for law in settings["laws"]:
        for level in settings["concurrency"]:
            cells = {
                system: cell
                for system in settings["systems"]
                if (cell := _cell(system, law, level, runs)).turns
            }
            records += [_record(cell, cells) for cell in cells.values()]
    return records


def plain_of(system: str) -> str:
    """Return the plain mode to compare a system with: ours, or its maker's, asked like it."""
    if system in (OURS, PLAIN):
        return PLAIN
    return f"{maker_of(system)} plain, {system.partition(', ')[2]}"


def maker_of(system: str) -> str:
    """The maker of a peer, e.g. "vLLM"; "" for ours."""
    return "" if system in (OURS, PLAIN) else system.partition(" ")[0]


def _cell(system: str, law: str, level: int, runs: Mapping[str, Any]) -> Cell:
    blocks = [
        block
        for run in runs.values()
        for block in run["blocks"]
        if (block["system"], run["law"], block["concurrency"]) == (system, law, level)
    ]
    turns = tuple(tuple(Turn.of(turn) for turn in block["turns"]) for block in blocks)
    return Cell(system, law, level, turns, sum(len(block["refused"]) for block in blocks))


def _record(cell: Cell, cells: Mapping[str, Cell]) -> dict[str, Any]:
    categories = list(dict.fromkeys(turn.category for turn in cell.turns))
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
        # Ratios to its own plain mode are by category, the others over all categories.
        "to_own_plain": _ratios(cell, cells.get(plain_of(cell.system)), categories),
        "to_plain": _ratios(cell, cells.get(PLAIN), ()),
        "whole_to_own_plain": _ratios(cell, cells.get(plain_of(cell.system)), (), whole),
        "to_fastest": _to_fastest(cell, cells),
        "acceptance_length": {
            category: acceptance_length(_of(cell.turns, category))
            for category in (ALL, *categories)
        },
        # Of the answers that had a draft verified at all.
        "drafted_share": float(np.mean([turn.steps > 0 for turn in cell.turns])),
    }


def _to_fastest(cell: Cell, cells: Mapping[str, Cell]) -> dict[str, dict[str, Any]]:
    """By maker of peers: which of its modes has the fastest streams here, the ratio of streams to
    it, and the ratio of all tokens per second to its greatest."""
    found = {}
    for maker in dict.fromkeys(maker_of(name) for name in cells if maker_of(name)):
        modes = [each for name, each in cells.items() if maker_of(name) == maker]
        fastest = max(modes, key=lambda each: stream_rate(each.turns))
        greatest = max((throughput(each) or 0.0 for each in modes), default=0.0)
        rate = throughput(cell)
        found[maker] = {
            "system": fastest.system,
            "stream": _ratios(cell, fastest, ()),
            "tokens_per_s": rate / greatest if rate and greatest else None,
        }
    return found


def _ratios(
    cell: Cell, base: Cell | None, categories: Sequence[str], work: Work = decoded
) -> dict[str, Estimate | None] | None:
    if base is None or base.system == cell.system:
        return None
    return {
        category: ratio(_of(cell.turns, category), _of(base.turns, category), work)
        for category in (ALL, *categories)
    }


def _of(turns: Sequence[Turn], category: str) -> list[Turn]:
    return [turn for turn in turns if category in (ALL, turn.category)]


def throughput(cell: Cell) -> float | None:
    """Return the tokens per second while `concurrency` answers were running, prefills included, as
    the mean over runs; None if so many never ran at once."""
    rates = []
    for turns in cell.runs:
        answers = [
            Answer(turn.submitted_s, ((turn.first_s, 1), (turn.last_s, turn.num_tokens)), ())
            for turn in turns
            if turn.num_tokens > 1
        ]
        if answers:
            level = min(cell.concurrency, len(answers))
            rates.append(rate_at_level(answers, level))
    reached = [rate for rate in rates if rate > 0.0]
    return float(np.mean(reached)) if reached else None


def stream_rate(turns: Sequence[Turn]) -> float:
    """Return the tokens per second of one client: all decoded tokens over all decode seconds."""
    seconds = sum(turn.decode_s for turn in turns)
    return sum(turn.decode_tokens for turn in turns) / seconds if seconds else 0.0


def ratio(above: Sequence[Turn], below: Sequence[Turn], work: Work = decoded) -> Estimate | None:
    """Return the ratio of two rates with its 95 % interval; None if one has no tokens.

    Questions are resampled, the same ones on both sides, because every question is answered both
    ways and its difficulty affects both alike.
    """
    ids = sorted({turn.question_id for turn in above} & {turn.question_id for turn in below})
    one, other = (_table(turns, ids, work) for turns in (above, below))
    if not ids or any(table.sum(axis=0).min() <= 0.0 for table in (one, other)):
        return None
    return _estimate(len(ids), lambda chosen: _quotients(one, chosen) / _quotients(other, chosen))


def acceptance_length(turns: Sequence[Turn]) -> Estimate | None:
    """Tokens per step that verified drafts, as vLLM defines it, with its 95 % interval over
    questions; None where there was none."""
    drafted = [turn for turn in turns if turn.steps]
    ids = sorted({turn.question_id for turn in drafted})
    if not ids:
        return None
    table = _table(drafted, ids, lambda turn: (turn.accepted + turn.steps, turn.steps))
    return _estimate(len(ids), lambda chosen: _quotients(table, chosen))


def _estimate(num_questions: int, value_of: Callable[[Any], Any]) -> Estimate:
    """A value over all questions, and its interval over resampled ones.

    value_of: float64[draws] of the places of prompts, int[draws, count]."""
    low = high = None
    value = float(value_of(np.arange(num_questions)[None])[0])
    if num_questions > 1:  # prompts that are drawn anew
        drawn = np.random.default_rng(0).integers(0, num_questions, (_DRAWS, num_questions))
        low, high = map(float, np.nanpercentile(value_of(drawn), [2.5, 97.5]))
    return {"value": value, "low": low, "high": high, "questions": num_questions}


def _table(turns: Sequence[Turn], ids: Sequence[int], fields: Work) -> Any:
    """float64[questions, 2]: the sums of two fields over the turns of each question."""
    places = {question_id: place for place, question_id in enumerate(ids)}
    table = np.zeros((len(ids), 2))
    for turn in turns:
        if turn.question_id in places:
            table[places[turn.question_id]] += fields(turn)
    return table


def _quotients(table: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """One column's sum over the other's, float64[draws], of float64[prompts, 2]."""
    sums = table[drawn].sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(sums[:, 0] / sums[:, 1])
