"""Summarises the cells of a comparison: medians, ratios with intervals, looping prompts apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BASELINE = "ours-plain"
_DRAWS = 2000
_LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")

Cell = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of two systems' decode rates and its 95 % bootstrap interval.

    low, high: None if there is only one run, so nothing to resample.
    """

    value: float
    low: float | None
    high: float | None


def cell_key(repetition: int, law: str, concurrency: int, system: str) -> str:
    return f"{repetition}/{law}/{concurrency}/{system}"


def summarise(settings: Mapping[str, Any], cells: Mapping[str, Cell]) -> list[dict[str, Any]]:
    """One record per measured sampling setting, concurrency and system, in that order."""
    records = []
    for law in settings["laws"]:
        for concurrency in settings["concurrency"]:
            runs = {
                system: [
                    cells[key]
                    for repetition in range(settings["repetitions"])
                    if (key := cell_key(repetition, law, concurrency, system)) in cells
                ]
                for system in settings["systems"]
            }
            runs = {system: found for system, found in runs.items() if found}
            for record in _records(runs, concurrency):
                records.append({"law": law, "concurrency": concurrency, **record})
    return records


def _records(runs: Mapping[str, Sequence[Cell]], concurrency: int) -> list[dict[str, Any]]:
    looping = looping_prompts(runs)
    peers = [system for system in runs if not system.startswith("ours-")]
    fastest = max(peers, key=lambda system: _rate(runs[system]), default=None)
    records = []
    for system, found in runs.items():
        lengths = [cell["mean_acceptance_length"] for cell in found]
        record: dict[str, Any] = {
            "system": system,
            "runs": len(found),
            "tokens_per_s": _rate(found),
            "whole_tokens_per_s": _median([cell["whole_tokens_per_s"] for cell in found]),
            **{name: _median([cell[name] for cell in found]) for name in _LATENCIES},
            "mean_acceptance_length": _median(lengths),
            "fastest_peer": fastest,
            "looping": _stream_rate(found, looping, among=True),
            "not_looping": _stream_rate(found, looping, among=False),
            "num_looping": len(looping),
        }
        for name, base in (("to_plain", BASELINE), ("to_fastest_peer", fastest)):
            if base in runs and base is not None:
                record[name] = _plain(compare(found, runs[base], by_prompt=concurrency == 1))
        records.append(record)
    return records


def looping_prompts(runs: Mapping[str, Sequence[Cell]]) -> set[int]:
    """Prompts for which the output of any system loops in any run.

    Loops favour drafters that copy from earlier text, so a prompt counts as not looping only if no
    output of it loops.
    """
    return {
        index
        for found in runs.values()
        for cell in found
        for index, answer in enumerate(cell["answers"])
        if answer["loops"]
    }


def compare(above: Sequence[Cell], below: Sequence[Cell], *, by_prompt: bool) -> Ratio:
    """The ratio of decode rates `above` / `below`, run k of one against run k of the other.

    Runs are resampled in pairs.  by_prompt: prompts were decoded one after the other, so each has
    its own rate and prompts are resampled too.
    """
    pairs = min(len(above), len(below))
    first, second = _table(above[:pairs]), _table(below[:pairs])
    num_prompts = min(first[0].shape[1], second[0].shape[1])
    value = _rate(above[:pairs]) / _rate(below[:pairs])
    if pairs < 2 and not (by_prompt and num_prompts > 1):
        return Ratio(value, None, None)
    generator = np.random.default_rng(0)
    chosen = generator.integers(0, pairs, (_DRAWS, pairs))
    if by_prompt:
        prompts = generator.integers(0, num_prompts, (_DRAWS, num_prompts))
        drawn = _drawn(first, chosen, prompts) / _drawn(second, chosen, prompts)
    else:
        rates = [
            np.array([cell["tokens_per_s"] for cell in cells[:pairs]]) for cells in (above, below)
        ]
        drawn = np.median(rates[0][chosen], axis=1) / np.median(rates[1][chosen], axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Ratio(value, float(low), float(high))


def _table(cells: Sequence[Cell]) -> tuple[Any, Any]:
    """Decoded tokens and decode seconds, float64[runs, prompts] each."""
    tokens = [[answer["decode_tokens"] for answer in cell["answers"]] for cell in cells]
    seconds = [[answer["decode_s"] for answer in cell["answers"]] for cell in cells]
    return np.array(tokens, dtype=np.float64), np.array(seconds, dtype=np.float64)


def _drawn(table: tuple[Any, Any], runs: Any, prompts: Any) -> Any:
    """The median over the drawn runs of the rate over the drawn prompts, float64[draws].

    runs: int[draws, runs], prompts: int[draws, prompts].
    """
    tokens, seconds = (part[runs[:, :, None], prompts[:, None, :]].sum(axis=2) for part in table)
    return np.median(tokens / seconds, axis=1)


def _stream_rate(cells: Sequence[Cell], looping: set[int], *, among: bool) -> float | None:
    """Tokens per second of one stream, over the looping or the other prompts."""
    rates = []
    for cell in cells:
        chosen = [
            answer
            for index, answer in enumerate(cell["answers"])
            if (index in looping) is among and answer["decode_s"] > 0
        ]
        if chosen:
            tokens = sum(answer["decode_tokens"] for answer in chosen)
            rates.append(tokens / sum(answer["decode_s"] for answer in chosen))
    return _median(rates)


def _rate(cells: Sequence[Cell]) -> float:
    return float(np.median([cell["tokens_per_s"] for cell in cells]))


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _plain(ratio: Ratio) -> dict[str, float | None]:
    return {"value": ratio.value, "low": ratio.low, "high": ratio.high}
