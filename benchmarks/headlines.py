"""Whether headline figures still hold: `python -m benchmarks.headlines`, a part of `make check`.

A headline is an item of README.md or docs/performance.md that begins with its figure in bold:

    * **1.30 (1.20 to 1.41) times** its own plain decoding, 168 answers ([record](docs/....md))

It says of how many answers it is and how sure, and links the record of its run.  The record names
commit and processor, as `benchmarks.support.record` writes them; the page names that processor, and
the commit is not more than so many before the last change of what the figure depends on.  A figure
of an older build may stand in the text, with its age, but is no headline.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.support.record import ROOT

PAGES = ("README.md", "docs/performance.md")
# What makes a text fast or slow.
DEPENDS_ON = ("cluster/engine", "cluster/plan", "cluster/spec")
MOST_COMMITS = 200

_ITEM = re.compile(r"^\* (\*\*.+(?:\n  .+)*)", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#]+\.md)")
_MADE = re.compile(r"commit (?P<commit>[0-9a-f]{7,40})\+?(?:, [0-9a-f]{7,40}\+?)*, (?P<cpu>[^,]+),")
_ANSWERS = re.compile(r"[\d,]+ (?:answers|of [\d,]+)")
_INTERVAL = re.compile(r"\(\d[\d.]* to \d[\d.]*\)|\d of \d")


def complaints(root: Path, most_commits: int = MOST_COMMITS) -> Iterator[str]:
    """What is wrong with the headlines of a checkout, one line each."""
    for page in PAGES:
        text = (root / page).read_text("utf-8")
        for item in _ITEM.findall(text):
            for wrong in _wrong(root, page, text, item, most_commits):
                yield f"{page}: {' '.join(item.split())[:60]!r}...: {wrong}"


def _wrong(root: Path, page: str, text: str, item: str, most_commits: int) -> Iterator[str]:
    if not _ANSWERS.search(item):
        yield "it does not say of how many answers it is; write `N answers`"
    if not _INTERVAL.search(item):
        yield "it does not say how sure it is; write its interval, `(LOW to HIGH)`"
    links = [(root / page).parent / link for link in _LINK.findall(item)]
    made = [found for path in links if path.exists() for found in _MADE.finditer(path.read_text())]
    if not made:
        yield "it links no record that names its commit and processor"
        return
    commit, cpu = made[0]["commit"], made[0]["cpu"]
    if cpu not in text:
        yield f"the page does not say that the processor was {cpu!r}"
    last = _git(root, "log", "-1", "--format=%H", "--", *DEPENDS_ON).strip()
    try:
        age = int(_git(root, "rev-list", "--count", f"{commit}..{last}"))
    except subprocess.CalledProcessError:
        yield f"commit {commit} of its record is none of this history"
        return
    if age > most_commits:
        yield (
            f"its record is of {commit}, {age} commits before the last change of "
            f"{', '.join(DEPENDS_ON)}; measure it again, or let it stand in the text with its age"
        )


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    if not (ROOT / ".git").exists() or "true" in _git(ROOT, "rev-parse", "--is-shallow-repository"):
        print("headlines: the history is not here, so the age of records is not known")
        return 0
    found = list(complaints(ROOT))
    print("\n".join(found) or "headlines: all of today's build")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
