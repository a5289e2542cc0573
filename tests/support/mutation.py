"""What `make mutation` found: mutants killed per module, and every one that lives.

`python -m tests.support.mutation`; the exit code is 1 while fewer than the wanted share are killed.
"""

import json
import sys
from collections import Counter
from pathlib import Path

WANTED = 0.85
# Mutmut keeps pytest's exit code or the signal that ended a mutant's tests; what it has not run is
# null.  A mutant that no test runs has survived, one that never ends was noticed.
_SURVIVED = {0, 5, 33}


def outcomes(folder: Path) -> dict[str, dict[str, bool | None]]:
    """Module to mutant to whether it was killed; None = not run."""
    found: dict[str, dict[str, bool | None]] = {}
    for path in sorted(folder.glob("cluster/**/*.meta")):
        codes = json.loads(path.read_text())["exit_code_by_key"]
        if codes:
            found[path.relative_to(folder).with_suffix("").as_posix()] = {
                name: None if code is None else code not in _SURVIVED
                for name, code in codes.items()
            }
    return found


def main(folder: Path = Path("mutants")) -> int:
    """Print the table and the survivors; returns the exit code."""
    total: Counter[bool | None] = Counter()
    survivors = []
    sys.stdout.write("| module | mutants | killed | survived | not run |\n|---|---|---|---|---|\n")
    for module, mutants in outcomes(folder).items():
        counts = Counter(mutants.values())
        total += counts
        survivors += [name for name, killed in mutants.items() if killed is False]
        sys.stdout.write(_row(f"`{module}`", counts))
    sys.stdout.write(_row("all", total) + "\nSurvivors (`mutmut show NAME`):\n")
    sys.stdout.writelines(f"  {name}\n" for name in survivors)
    return 0 if total[True] >= WANTED * (total[True] + total[False]) else 1


def _row(name: str, counts: Counter[bool | None]) -> str:
    ran = counts[True] + counts[False]
    share = f"{counts[True] / ran:.1%}" if ran else "-"
    return f"| {name} | {ran} | {share} | {counts[False]} | {counts[None]} |\n"


if __name__ == "__main__":
    sys.exit(main())
