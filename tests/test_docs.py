"""The pages lead somewhere: links, commands of benchmarks, and the length of the first page."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
# Packages that are no theme: what themes share, and the model that they measure with.
_NO_THEMES = {"support", "grown"}
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_COMMAND = re.compile(r"python -m (benchmarks[\w.]*)")


def pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).exists()]


def test_every_link_to_a_file_leads_to_one() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages()
        for target in _LINK.findall(page.read_text("utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert len(pages()) > 10
    assert broken == []


def test_every_benchmark_that_a_page_names_can_be_started() -> None:
    # A record keeps the command as it was typed then: they are those with a date after it.
    commands = {
        module.rstrip(".")
        for page in pages()
        for line in page.read_text("utf-8").splitlines()
        if not re.search(r"`python -m .*`, 20\d\d-", line)
        for module in _COMMAND.findall(line)
    }
    assert len(commands) > 8
    for module in sorted(commands):
        spec = importlib.util.find_spec(module)
        assert spec is not None, module
        if spec.submodule_search_locations:
            assert importlib.util.find_spec(f"{module}.__main__"), f"{module} is no command"


@pytest.mark.parametrize(
    "theme",
    sorted(path.parent.name for path in BENCHMARKS.glob("*/__init__.py")
           if path.parent.name not in _NO_THEMES),
)  # fmt: skip
def test_every_theme_says_what_it_measures_how_and_what_a_row_means(theme: str) -> None:
    page = (ROOT / "docs" / "benchmarks" / theme / "README.md").read_text("utf-8")
    assert "```\n" in page, "its command"
    assert re.search(r"\*\*A row\*\*", page)


def test_every_module_of_the_benchmarks_can_be_imported_by_its_name() -> None:
    for path in BENCHMARKS.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        assert importlib.util.find_spec(name) is not None, name


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150
