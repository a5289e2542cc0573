"""A few questions, stored here so that nothing is downloaded.

Their answers do not matter; the test is that scores and texts come back.
"""

import json
from pathlib import Path

import datasets

_QUESTIONS = [
    {"question": f"{left} + {right} =", "choices": [f" {left + right}", f" {left - right}"]}
    for left in (3, 5, 8, 13)
    for right in (1, 2)
]
# Texts on which no model of this repository was trained.
_HELD_OUT = Path(__file__).resolve().parents[4] / "models" / "heldout.jsonl"
_TEXTS_PER_PAGE, _NUM_PAGES = 5, 8


def questions(**_settings: object) -> dict[str, datasets.Dataset]:
    return {"test": datasets.Dataset.from_list(_QUESTIONS)}


def pages() -> list[str]:
    lines = _HELD_OUT.read_text("utf-8").splitlines()[: _TEXTS_PER_PAGE * _NUM_PAGES]
    found = [str(json.loads(line)["text"]) for line in lines]
    starts = range(0, len(found), _TEXTS_PER_PAGE)
    return ["\n\n".join(found[start : start + _TEXTS_PER_PAGE]) for start in starts]


def texts(**_settings: object) -> dict[str, datasets.Dataset]:
    return {"test": datasets.Dataset.from_list([{"page": page} for page in pages()])}
