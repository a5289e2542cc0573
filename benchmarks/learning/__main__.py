"""python -m benchmarks.learning record | measure | ways | cost: see docs/benchmarks/learning."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.learning.cost import measured_cost
from benchmarks.learning.measure import measured
from benchmarks.learning.traffic import record
from benchmarks.learning.ways import compared
from benchmarks.support.record import OUT, commit, show_report

TARGET = "smollm2-135m-instruct"
DRAFTER = "models/smollm2-135m-draft"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning")
    parser.add_argument("verb", choices=("record", "measure", "ways", "cost"))
    parser.add_argument("--recorded", type=Path, required=True, help="folder of recorded answers")
    parser.add_argument("--tokens", type=int, default=200_000, help="of recorded answers")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--drafter", default=DRAFTER, help="before it learns from them")
    parser.add_argument("--learned", help="the drafter that has learned from them")
    parser.add_argument("--originals", type=Path, help="of the training: WORK/NAME/answers")
    parser.add_argument("--out", type=Path, default=OUT / "learning" / "french.json")
    given = parser.parse_args()
    if given.verb == "record":
        record(given.target, given.drafter, given.recorded, given.tokens)
        return
    if given.verb == "cost":
        summary = measured_cost(given.target, given.drafter, given.recorded)
    elif given.verb == "ways" and given.originals:
        summary = compared(given.target, given.drafter, given.recorded, given.originals)
    elif given.verb == "measure" and given.originals and given.learned:
        drafters = {"before": given.drafter, "after": given.learned}
        summary = measured(given.target, drafters, given.recorded, given.originals)
    else:
        parser.error("ways needs --originals, and measure --learned too")
    show_report(given.out, {"commits": [commit()], "target": given.target, "summary": summary})


if __name__ == "__main__":
    main()
