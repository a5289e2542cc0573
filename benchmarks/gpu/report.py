"""Writes the Markdown of `benchmarks.gpu`: the JSON's figures as four tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def markdown(report: Mapping[str, Any]) -> str:
    """The Markdown page; all its figures come from `report`."""
    warning = (
        "**A trial of the path at tiny sizes: these figures say nothing about speed.**\n\n"
        if report["tiny"]
        else ""
    )
    return (
        f"# {report['device']}, {report['date']}\n\n"
        f"{warning}"
        f"`{report['command']}`, torch {report['software']['torch']}, "
        f"{report['seconds']:.0f} s in all.  Copy bandwidth "
        f"{report['copy_bytes_per_s'] / 1e9:.0f} GB/s, bytes read and written both counted.\n\n"
        "## Attention against the reference\n\n"
        f"{_kernels(report['kernels'])}\n"
        "## Draw at temperature 0.8, against noise in memory\n\n"
        f"{_draws(report['draws'])}\n"
        "## Plain decoding\n\n"
        "Greedy, engine and draw driven directly.  The limit is weight bytes / copy bandwidth per "
        "step.  All models are grown from the demonstration target.  *Eager*: the same without "
        "CUDA graphs.\n\n"
        f"{_plain(report['models'])}\n"
        "## Speculative decoding\n\n"
        "The demonstration drafter on the same device.  *In series*: drafting between two steps; "
        "*free*: drafting not counted, which no overlap can exceed.  Ratios to plain.\n\n"
        f"{_speculative(report['models'])}"
    )


def _kernels(rows: Iterable[Mapping[str, Any]]) -> str:
    return _table(
        ["batch", "context", "nodes", "largest error", "us", "reference us", "GB/s", "of copy"],
        (
            [
                row["batch"], row["context"], row["nodes"], f"{row['largest_error']:.1e}",
                f"{row['us']:.1f}", f"{row['reference_us']:.1f}", f"{row['gb_per_s']:.0f}",
                f"{row['share_of_copy_bandwidth']:.0%}",
            ]
            for row in rows
        ),
    )  # fmt: skip


def _draws(rows: Iterable[Mapping[str, Any]]) -> str:
    return _table(
        ["rows", "vocabulary", "different tokens", "us", "reference us"],
        (
            [
                row["rows"], row["vocab"], row["different_tokens"], f"{row['us']:.1f}",
                f"{row['reference_us']:.1f}",
            ]
            for row in rows
        ),
    )  # fmt: skip


def _plain(models: Iterable[Mapping[str, Any]]) -> str:
    return _table(
        ["shape", "GB", "batch", "CUDA graphs", "tokens/s", "round ms", "step ms",
         "limit tokens/s", "of limit", "eager tokens/s", "eager step ms", "to eager"],
        (
            [
                model["shape"], f"{model['weight_bytes'] / 1e9:.2f}", row["batch"],
                "yes" if model["cuda_graphs"] else "no", f"{row['plain_tokens_per_s']:.1f}",
                f"{row['plain_round_ms']:.2f}", f"{row['plain_step_ms']:.2f}",
                f"{row['limit_tokens_per_s']:.0f}", f"{row['share_of_limit']:.1%}",
                f"{row['eager_tokens_per_s']:.1f}", f"{row['eager_step_ms']:.2f}",
                f"{row['gain_of_graphs']:.2f}x",
            ]
            for model in models
            for row in model["batches"]
        ),
    )  # fmt: skip


def _speculative(models: Iterable[Mapping[str, Any]]) -> str:
    return _table(
        ["shape", "batch", "nodes", "tokens/round", "draft ms", "verify ms", "in series", "free",
         "equal to plain"],
        (
            [
                model["shape"], row["batch"], run["nodes"], f"{run['tokens_per_round']:.2f}",
                f"{run['draft_ms']:.2f}", f"{run['verify_ms']:.2f}",
                f"{run['ratio_in_series']:.2f}x", f"{run['ratio_drafts_free']:.2f}x",
                f"{run['tokens_equal_to_plain']:.1%}",
            ]
            for model in models
            for row in model["batches"]
            for run in row["speculative"]
        ),
    )  # fmt: skip


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)
