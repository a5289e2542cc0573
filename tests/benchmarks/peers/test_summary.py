"""Ratios, intervals and the division into looping prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.report import markdown
from benchmarks.peers.summary import cell_key, compare, looping_prompts, summarise


def cell(rates: list[float], looping: tuple[int, ...] = ()) -> dict[str, Any]:
    """Prompts decoded one after the other, 100 tokens each, at these rates."""
    answers = [
        {"decode_tokens": 100, "decode_s": 100 / rate, "loops": index in looping}
        for index, rate in enumerate(rates)
    ]
    total_s = sum(answer["decode_s"] for answer in answers)
    return {
        "tokens_per_s": 100 * len(rates) / total_s,
        "whole_tokens_per_s": 50 * len(rates) / total_s,
        "ttft_p50_ms": 1.0, "ttft_p99_ms": 2.0, "itl_p50_ms": 3.0, "itl_p99_ms": 4.0,
        "mean_acceptance_length": None, "answers": answers,
    }  # fmt: skip


def settings(**more: Any) -> dict[str, Any]:
    return {
        "laws": ["greedy"], "concurrency": [1], "repetitions": 2, "cores": [0], "max_tokens": 100,
        "systems": ["ours-plain", "ours-lm", "vllm-plain", "vllm-ngram"], "target": "t",
        "dtype": "bfloat16", **more,
    }  # fmt: skip


def cells() -> dict[str, Any]:
    rates = {"ours-plain": 10.0, "ours-lm": 30.0, "vllm-plain": 12.0, "vllm-ngram": 20.0}
    return {
        cell_key(run, "greedy", 1, system): cell(
            [rate, rate * 1.5], (1,) if "ngram" in system else ()
        )
        for system, rate in rates.items()
        for run in range(2)
    }


def test_ratios_are_to_our_plain_and_to_the_fastest_peer() -> None:
    records = {record["system"]: record for record in summarise(settings(), cells())}
    assert records["ours-lm"]["to_plain"]["value"] == pytest.approx(3.0)
    assert records["ours-lm"]["fastest_peer"] == "vllm-ngram"
    assert records["ours-lm"]["to_fastest_peer"]["value"] == pytest.approx(1.5)


def test_a_prompt_on_which_any_system_loops_is_looping_for_all() -> None:
    runs = {"a": [cell([1.0, 1.0, 1.0], (2,))], "b": [cell([1.0, 1.0, 1.0], (0,))]}
    assert looping_prompts(runs) == {0, 2}
    records = {record["system"]: record for record in summarise(settings(), cells())}
    assert records["ours-lm"]["num_looping"] == 1
    assert records["ours-lm"]["looping"] == pytest.approx(45.0)
    assert records["ours-lm"]["not_looping"] == pytest.approx(30.0)


def test_equal_runs_have_an_interval_of_no_width() -> None:
    ratio = compare([cell([20.0, 20.0])] * 5, [cell([10.0, 10.0])] * 5, by_prompt=True)
    assert ratio.low == pytest.approx(2.0)
    assert ratio.high == pytest.approx(2.0)


def test_the_interval_covers_the_variation_of_runs_and_prompts() -> None:
    above = [cell([20.0, 40.0]), cell([22.0, 44.0]), cell([18.0, 36.0])]
    ratio = compare(above, [cell([10.0, 10.0])] * 3, by_prompt=True)
    assert ratio.low is not None
    assert ratio.high is not None
    assert 1.8 <= ratio.low < ratio.value < ratio.high <= 4.4


def test_a_single_run_of_a_batch_has_no_interval() -> None:
    ratio = compare([cell([20.0, 20.0])], [cell([10.0, 10.0])], by_prompt=False)
    assert ratio.value == pytest.approx(2.0)
    assert ratio.low is None
    assert ratio.high is None


def test_runs_that_are_missing_on_one_side_are_left_out_of_the_pairs() -> None:
    above = [cell([20.0, 20.0]), cell([2000.0, 2000.0])]
    assert compare(above, [cell([10.0, 10.0])], by_prompt=True).value == pytest.approx(2.0)


def test_the_report_shows_the_ratio_with_its_interval_and_what_was_not_measured() -> None:
    document = {
        "command": "c", "date": "d", "versions": {"torch": "2"},
        "machine": {"cpu": "x", "cores": 2, "python": "3"}, "settings": settings(
            grown_from={"model": "small"}),
        "summary": summarise(settings(), cells()),
        "failures": {"vllm-suffix": "another package"},
    }  # fmt: skip
    text = markdown(json.loads(json.dumps(document)))
    assert "| ours-lm | 2 | 36.0 | 18.0 | 3.00 (3.00 to 3.00) | 1.50 (1.50 to 1.50) |" in text
    assert "**grown** from small" in text
    assert "vllm-suffix: another package" in text


def test_the_picture_is_drawn_or_the_error_names_matplotlib(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.peers.report import picture

    document = {"settings": settings(), "summary": summarise(settings(), cells())}
    picture(document, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
