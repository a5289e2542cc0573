"""Measures what drafts of another vocabulary cost: text into the target's tokens, per commit.

    python -m benchmarks.drafting.bridge models/heldout.jsonl --target smollm2-135m-instruct

TEXTS: JSON lines with `text`.  An engine foretells each text in tokens of --engine, so many ahead;
the target commits its own, one at a time.  Every commit is followed, what the engine says meanwhile
is taken in, and the chain is written anew as far as it is settled: all that a drafter of text does
between a commit and its proposal, but for the network.

Bar: 0.3 ms a commit, 99 of 100 of them.  Exit status 1 where it is missed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.support.options import parser_of
from benchmarks.support.record import OUT, show_report
from cluster.draft.text_bridge import BridgedDraft, TextBridge
from cluster.models.resolve import resolve
from cluster.models.token_bytes import TokenBytes

_MAX_MS = 0.3
_PROMPT_TOKENS = 4


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("texts", type=Path)
    add("--target", required=True)
    add("--engine", default="models/demo-target", help="whose tokens the engine speaks in")
    add("--ahead", type=int, default=32, help="tokens that the engine is ahead")
    add("--commits", type=int, default=20_000)
    add("--out", type=Path, default=OUT / "drafting" / "bridge.json")
    arguments = parser.parse_args()
    target = TokenBytes.load(resolve(arguments.target, only_tokenizer=True))
    engine = TokenBytes.load(resolve(arguments.engine, only_tokenizer=True))
    took: list[float] = []
    settled: list[int] = []
    for line in arguments.texts.read_text(encoding="utf-8").splitlines():
        if len(took) >= arguments.commits:
            break
        _lead(target, engine, json.loads(line)["text"], arguments.ahead, took, settled)
    times = 1e3 * np.array(took)
    report = {
        "target": arguments.target,
        "engine": arguments.engine,
        "ahead": arguments.ahead,
        "commits": len(took),
        "ms per commit": {
            "mean": round(float(times.mean()), 4),
            **{f"p{share}": round(float(np.percentile(times, share)), 4) for share in (50, 99)},
        },
        "settled tokens ahead": round(float(np.mean(settled)), 2),
    }
    show_report(arguments.out, report)
    return int(float(np.percentile(times, 99)) > _MAX_MS)


def _lead(
    target: TokenBytes,
    engine: TokenBytes,
    text: str,
    ahead: int,
    took: list[float],
    settled: list[int],
) -> None:
    """Add the seconds of each commit of one text, and the tokens that were settled after it."""
    ids = target.encode(text)
    prompt, rest = ids[:_PROMPT_TOKENS], ids[_PROMPT_TOKENS:]
    draft = BridgedDraft(TextBridge(target), target.decode(prompt))
    said = engine.write(text.encode()[len(target.decode(prompt)) :])[0]
    num_said = 0
    for index, token in enumerate(rest):
        due = min(index * len(said) // max(len(rest), 1) + ahead, len(said))
        data = engine.decode(said[num_said:due])
        num_said = due
        began = time.perf_counter()
        draft.follow([token])
        draft.extend(data)
        draft.settle()
        took.append(time.perf_counter() - began)
        settled.append(len(draft.chain))


if __name__ == "__main__":
    sys.exit(main())
