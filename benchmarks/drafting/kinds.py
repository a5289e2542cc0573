"""Writes questions of kinds that Spec-Bench lacks, for `benchmarks.spec_bench` to measure.

    python -m benchmarks.drafting.kinds QUESTIONS --config configs/local.yaml --out kinds.jsonl

The kinds are code to continue, JSON by a schema, edits with a prediction, and conversations of
three JSON answers by one schema, like an agent's calls.  QUESTIONS: Spec-Bench's JSONL, from which
the edits are made.  A prediction is the target's answer under the law with a tenth of its words
replaced, so a file is valid for one law and for answers of at most `--max-tokens`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.drafting.steps import prepare
from benchmarks.drafting.texts import KINDS, asks
from cluster.config.file import load
from cluster.core import SamplingParams


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.drafting.kinds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("questions", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--per-kind", type=int, default=12, help="questions of each kind")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(words)
    config = load(arguments.config).config
    asked = [
        each for each in asks(arguments.questions, arguments.per_kind) if each.category in KINDS
    ]
    law = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)
    lines = [
        json.dumps(each.ask.question(each.seed, each.prediction))
        for each in prepare(config, asked, law)
    ]
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
