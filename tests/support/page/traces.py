"""Traces that the page opens."""

from typing import Any


def traced(text: str) -> dict[str, Any]:
    """A trace in which every text is `text`."""
    token = {"id": 7, "bytes": list(text.encode()), "drafters": [text]}
    piece = {"ms": 5, "text": text, "tokens": [token, token]}
    nodes = [[-1, 7, text, 0.5, 1], [0, 8, text, 0.5, 1]]
    step = {
        "n": 0,
        "at_ms": 5,
        "drafters": [text],
        "nodes": nodes,
        "path": [0],
        "own": [9, text],
        "ms": {"draft": 1, "step": 2},
        "batch": 1,
        "why": text,
    }
    answers = [
        {"drafts": drafts, "pieces": [piece], "steps": [step], "stats": {"decode_time_s": 1}}
        for drafts in (True, False)
    ]
    return {
        "drafthouse": "trace",
        "version": 1,
        "model": text,
        "made": text,
        "prompt": text,
        "answers": answers,
        "steps": [step],
    }
