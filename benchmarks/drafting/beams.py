"""Measures beam searches with drafts of their own text beside the same searches without.

    python -m benchmarks.drafting.beams --model smollm2-135m-instruct [--weights bf16]

Prompts are those of `benchmarks.support.prompts`: ordinary ones (prose, code, chats) and ones whose
answer repeats them (records of JSON, edits).  Each search runs alone, in pairs whose order
alternates; the time of a pair's search without drafts over that of the other is its speed-up.
Reports the median over the pairs of each prompt, and of these by kind.  All texts of a pair must be
the same, or the difference is told: rows of steps of other sizes may differ in their last bits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.support.prompts import prompts
from benchmarks.support.record import OUT, show_report
from cluster.config.schema import EngineConfig
from cluster.core import EMPTY_TREE, SamplingParams, token_array
from cluster.engine.cpu.threads import configure_threads
from cluster.engine.engine import Engine
from cluster.models.fingerprint import load_pretrained_tokenizer
from cluster.models.resolve import resolve
from cluster.requests.beam_spec import BeamSpec
from cluster.spec.token_log import TokenLog
from cluster.worker.text_record import TextRecord
from cluster.worker.verifier import Verifier

_REPEATING = ("json", "edit")
_KINDS = ("prose", "code", "chat", *_REPEATING)
_MOST_DRAFTS = 16  # coordinator.max_draft_tokens


@dataclass(frozen=True, slots=True)
class Search:
    """A search that has run: its seconds, forwards and texts."""

    time_s: float
    num_forwards: int
    texts: Sequence[int]


def search(
    verifier: Verifier, token_ids: Sequence[int], params: SamplingParams, most: int
) -> Search:
    """Run one search.  most: drafts of a step, 0 = none."""
    tokens = TokenLog(token_array(token_ids))
    text = TextRecord("a", 1, len(tokens), params, "", b"", frozenset(), tokens, draft_nodes=most)
    began = time.perf_counter()
    refused = verifier.submit([(text, EMPTY_TREE)])
    for count in range(1, 10_000):
        stepped = verifier.step()
        if refused or stepped.refused:
            raise SystemExit(f"the search was refused: {refused or stepped.refused}")
        if stepped.verdicts:
            time_s = time.perf_counter() - began
            return Search(time_s, count, stepped.verdicts[0].token_ids.tolist())
    raise SystemExit("the search did not end")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse_args(argv)
    config = EngineConfig(model=arguments.model, weights=arguments.weights)
    configure_threads(config)
    engine = Engine.load(config)
    profile = engine.profile_steps()
    verifier = Verifier(engine, profile=profile)
    params = SamplingParams(
        max_tokens=arguments.max_tokens, stop_token_ids=tuple(engine.eos_token_ids),
        beams=BeamSpec(arguments.beams),
    )  # fmt: skip
    tokenizer = load_pretrained_tokenizer(resolve(arguments.model))
    rows: list[dict[str, Any]] = []
    search(verifier, (5, 6, 7), params, _MOST_DRAFTS)  # warm
    for prompt in prompts(arguments.prompts, tokenizer, _KINDS):
        pairs = []
        for turn in range(arguments.pairs):
            order = (0, _MOST_DRAFTS) if turn % 2 else (_MOST_DRAFTS, 0)
            found = {most: search(verifier, prompt.token_ids, params, most) for most in order}
            pairs.append((found[0], found[_MOST_DRAFTS]))
        plain, drafted = pairs[0]
        rows.append({
            "kind": prompt.kind,
            "speed_up": round(median(one.time_s / other.time_s for one, other in pairs), 3),
            "steps_per_forward": round(plain.num_forwards / drafted.num_forwards, 2),
            "plain_ms": round(1000 * median(p.time_s / p.num_forwards for p, _ in pairs), 2),
            "drafted_ms": round(1000 * median(d.time_s / d.num_forwards for _, d in pairs), 2),
            "same_texts": plain.texts == drafted.texts,
        })  # fmt: skip
    ordinary = tuple(kind for kind in _KINDS if kind not in _REPEATING)
    speeds = {
        name: round(median(row["speed_up"] for row in rows if row["kind"] in kinds), 3)
        for name, kinds in (("ordinary", ordinary), ("repeating", _REPEATING), ("all", _KINDS))
    }
    name = "demo" if "demo" in arguments.model else f"smollm2-{arguments.weights}"
    report = {
        "settings": vars(arguments),
        "speed_up": speeds,
        "profile_ms": None if profile is None else
        dict(zip(profile.rows, (round(1000 * each, 2) for each in profile.times_s), strict=True)),
        "prompts": rows,
    }  # fmt: skip
    show_report(OUT / "drafting" / f"beams-{name}.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
