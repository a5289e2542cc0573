"""Writes the Markdown of `benchmarks.gpu`: the JSON's figures as four tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.support.page import head, row


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
        f"{_table(_KERNELS, report['kernels'])}\n"
        "## Draw at temperature 0.8, against noise in memory\n\n"
        f"{_table(_DRAWS, report['draws'])}\n"
        "## Plain decoding\n\n"
        "Greedy, engine and draw driven directly.  The limit is weight bytes / copy bandwidth per "
        "step.  All models are grown from the demonstration target.  *Eager*: the same without "
        "CUDA graphs.\n\n"
        f"{_table(_PLAIN, _plain_rows(report['models']))}\n"
        "## Speculative decoding\n\n"
        "The demonstration drafter on the same device.  *In series*: drafting between two steps; "
        "*free*: drafting not counted, which no overlap can exceed.  Ratios to plain.\n\n"
        f"{_table(_SPECULATIVE, _speculative_rows(report['models']))}"
    )


# Of each table the title and the format of a column; the fields are those of its rows.
_KERNELS = {
    "batch": "{batch}",
    "context": "{context}",
    "nodes": "{nodes}",
    "largest error": "{largest_error:.1e}",
    "us": "{us:.1f}",
    "reference us": "{reference_us:.1f}",
    "GB/s": "{gb_per_s:.0f}",
    "of copy": "{share_of_copy_bandwidth:.0%}",
}
_DRAWS = {
    "rows": "{rows}",
    "vocabulary": "{vocab}",
    "different tokens": "{different_tokens}",
    "us": "{us:.1f}",
    "reference us": "{reference_us:.1f}",
}
_PLAIN = {
    "shape": "{shape}",
    "GB": "{gb:.2f}",
    "batch": "{batch}",
    "CUDA graphs": "{graphs}",
    "tokens/s": "{plain_tokens_per_s:.1f}",
    "round ms": "{plain_round_ms:.2f}",
    "step ms": "{plain_step_ms:.2f}",
    "limit tokens/s": "{limit_tokens_per_s:.0f}",
    "of limit": "{share_of_limit:.1%}",
    "eager tokens/s": "{eager_tokens_per_s:.1f}",
    "eager step ms": "{eager_step_ms:.2f}",
    "to eager": "{gain_of_graphs:.2f}x",
}
_SPECULATIVE = {
    "shape": "{shape}",
    "batch": "{batch}",
    "nodes": "{nodes}",
    "tokens/round": "{tokens_per_round:.2f}",
    "draft ms": "{draft_ms:.2f}",
    "verify ms": "{verify_ms:.2f}",
    "in series": "{ratio_in_series:.2f}x",
    "free": "{ratio_drafts_free:.2f}x",
    "equal to plain": "{tokens_equal_to_plain:.1%}",
}


def _table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    written = [row(form.format(**each) for form in columns.values()) for each in rows]
    return "\n".join([*head(columns), *written]) + "\n"


def _plain_rows(models: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for model in models:
        graphs = "yes" if model["cuda_graphs"] else "no"
        for batch in model["batches"]:
            gb = model["weight_bytes"] / 1e9
            yield {"shape": model["shape"], "gb": gb, "graphs": graphs, **batch}


def _speculative_rows(models: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for batch in _plain_rows(models):
        yield from ({**batch, **run} for run in batch["speculative"])
