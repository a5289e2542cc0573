"""Writes every generated file that is stale: `python -m docs.tools [stubs|pages|dashboards]`.

--check writes nothing; it names the stale files and exits with 1 if there are any.  Needs the
development's packages, which serving does not.
"""

from __future__ import annotations

import argparse
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Each gives the text of every file, None for one that is left over.  They are imported in turn,
# since what comes later imports the stubs.
PARTS: Mapping[str, Iterable[str]] = {
    "stubs": ("docs.tools.stubs:files",),
    "pages": ("docs.tools.reference:pages", "docs.tools.api:pages", "tests.support.gpu.page:files"),
    "dashboards": ("k8s.tools.monitoring:files",),
}


def renew(wanted: Mapping[Path, str | None], *, check: bool) -> list[Path]:
    """Return the files that are stale; without `check`, write them first."""
    stale = {
        path: text
        for path, text in wanted.items()
        if (path.read_text("utf-8") if path.exists() else None) != text
    }
    for path, text in {} if check else stale.items():
        if text is None:
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")
    return [*stale]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.tools", description=__doc__)
    parser.add_argument("part", nargs="?", choices=PARTS, help="what to write; all if left out")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    asked = parser.parse_args(arguments)
    stale: list[Path] = []
    for part in [asked.part] if asked.part else PARTS:
        for name in PARTS[part]:
            stale += renew(pkgutil.resolve_name(name)(), check=asked.check)
    said = "{} is stale; run: make docs\n" if asked.check else "wrote {}\n"
    sys.stderr.writelines(said.format(path.relative_to(ROOT)) for path in stale)
    return int(asked.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
