"""The tables of the answers to real questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.spec_bench.summary import ALL
from benchmarks.support.page import head, not_measured, number, origin, ratio, row

Record = Mapping[str, Any]

_TITLES = (
    "system",
    "answers",
    "refused",
    "tokens/s",
    "one stream",
    "to its own plain",
    "to our plain",
    "whole answers to its own plain",
    "TTFT p50, ms",
    "acceptance length",
    "answers with drafts",
)
_RATIOS = ("to_own_plain", "to_plain", "whole_to_own_plain")


def markdown(document: Mapping[str, Any]) -> str:
    """The whole report as Markdown."""
    settings = document["settings"]
    lines = ["# Real questions", "", origin(document), "", *_about(settings)]
    for note in settings["notes"]:
        lines += ["", f"**{note}.**"]
    for law in settings["laws"]:
        for level in settings["concurrency"]:
            chosen = [
                record
                for record in document["summary"]
                if (record["law"], record["concurrency"]) == (law, level)
            ]
            if chosen:
                lines += ["", f"## {law}, {level} at a time", "", *_systems(chosen)]
                lines += ["", *_categories(chosen)]
    return "\n".join([*lines, *not_measured(document["failures"])]) + "\n"


def _about(settings: Mapping[str, Any]) -> list[str]:
    lines = [
        f"`{settings['model']}`, `{settings['config']}`"
        f"{''.join(f' `{each}`' for each in settings['overrides'])}, drafters "
        f"{', '.join(settings['drafters']) or 'none'}. {settings['questions']} questions of "
        f"`{settings['file']}`, shared out over the levels; {_seen(settings.get('seen', 0))}. "
        f"At most {settings['max_tokens']} tokens per answer. Client and servers share all cores.",
    ]
    if settings["peers"]:
        tokens = ", ".join(
            f"{mode} {count}" for mode, count in settings["draft_tokens"].items() if count
        )
        lines += [
            "",
            f"{', '.join(f'{maker} {each}' for maker, each in settings['peers'].items())}, over "
            "HTTP asked by the same client as ours, or in process, without HTTP. Draft tokens per "
            f"step, at most: {tokens or 'none'}. Ratios to a peer are to the fastest of its modes: "
            "of one stream, and of tokens/s.",
        ]
    return lines


def _seen(times: int) -> str:
    if times:
        return f"each was asked {times} times before in the life of the server that is measured"
    return "each is asked once in the life of a server, so no look-up and no cache has seen it"


def _systems(records: Sequence[Record]) -> list[str]:
    makers = list(records[0]["to_fastest"])
    return [
        *head([*_TITLES, *(f"to {maker}" for maker in makers)]),
        *(
            row(
                [
                    record["system"],
                    str(record["answers"]),
                    str(record["refused"]),
                    number(record["tokens_per_s"]),
                    number(record["stream_tokens_per_s"]),
                    *(_all(record[name]) for name in _RATIOS),
                    number(record["ttft_p50_ms"]),
                    ratio(record["acceptance_length"][ALL]),
                    f"{record['drafted_share']:.0%}",
                    *(_to_fastest(record["to_fastest"][maker]) for maker in makers),
                ]
            )
            for record in records
        ),
    ]


def _to_fastest(found: Mapping[str, Any]) -> str:
    if found["stream"] is None:
        return number(found["tokens_per_s"], 2)
    return f"{_all(found['stream'])}; {number(found['tokens_per_s'], 2)}"


def _all(ratios: Mapping[str, Any] | None) -> str:
    return ratio(ratios[ALL]) if ratios else ""


def _categories(records: Sequence[Record]) -> list[str]:
    """Tables of the ratio to plain and of acceptance lengths, for systems with a plain mode."""
    chosen = [record for record in records if record["to_own_plain"]]
    if not chosen:
        return []
    categories = [name for name in chosen[0]["acceptance_length"] if name != ALL]
    lines = head(["by category", *categories])
    for record in chosen:
        for title, name in (
            ("to its own plain", "to_own_plain"),
            ("acceptance length", "acceptance_length"),
        ):
            cells = [ratio(record[name].get(category)) for category in categories]
            lines.append(row([f"{record['system']}: {title}", *cells]))
    return lines
