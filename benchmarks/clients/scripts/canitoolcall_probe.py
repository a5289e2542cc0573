"""canitoolcall's live probe; only the findings that a server is responsible for count.

The model decides whether it calls a tool that it may call, and a small one often does not.  All
other findings count: a forced call that is missing, arguments against the schema, markers that
leak, a stream that differs from the whole answer.
"""

import json
import re
import subprocess
import sys

_MISSING = re.compile(r"expected at least \d+ tool call\(s\) \[.*\], got \[.*\]")


def is_of_the_model(outcome: dict[str, object]) -> bool:
    detail = str(outcome["detail"])
    return outcome["scenario_id"] != "forced-tool-choice" and bool(_MISSING.fullmatch(detail))


if __name__ == "__main__":
    base_url, model, out = sys.argv[1:]
    probe = [sys.executable, "-m", "canitoolcall", "probe"]
    command = [*probe, "--base-url", base_url, "--model", model, "--json", out]
    # A small model that begins to repeat itself goes on until its context is full.
    subprocess.run([*command, "--timeout", "300"], check=False)
    with open(out, encoding="utf-8") as file:
        outcomes = json.load(file)["outcomes"]
    bad = [each for each in outcomes if each["status"] in ("fail", "error")]
    ours = [each for each in bad if not is_of_the_model(each)]
    print(f"{len(outcomes)} outcomes; the model called too few tools in {len(bad) - len(ours)}")
    for each in ours:
        print(f"{each['scenario_id']}: {each['detail']}")
    sys.exit(bool(ours) or not outcomes)
