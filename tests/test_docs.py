"""The pages lead somewhere: links, names of settings, tests and benchmarks; examples hold.

What stands in fences is read in tests/test_fences.py."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

from cluster.config.parse import key_of
from cluster.config.schema import Config
from cluster.core import TokenTree
from cluster.spec.tree import walk_draws
from tests.config.test_refused import GONE
from tests.conftest import REPOSITORY as ROOT
from tests.conftest import said_by

BENCHMARKS = ROOT / "benchmarks"
# Packages that are no theme: what themes share.
_NO_THEMES = {"support"}
# What else stands behind a section's name and a dot: in certificates, and Serve's own key.
_NO_KEYS = {"drafthouse", "user_config"}
# Of a page, of a heading, or both.
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]+))?\)")
_COMMAND = re.compile(r"python -m (benchmarks[\w.]*)")


def pages() -> list[Path]:
    listed = said_by("git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md")
    return [ROOT / name for name in listed.split() if (ROOT / name).exists()]


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text("utf-8")


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {each.strip().replace(" ", "-") for each in words}


def leads_somewhere(page: Path, target: str, anchor: str) -> bool:
    place = page.parent / target if target else page
    return "://" in target or (place.exists() and (not anchor or anchor in anchors(place)))


def test_every_link_leads_to_a_file_and_its_heading():
    broken = [
        f"{page.relative_to(ROOT)}: {target}#{anchor}"
        for page in pages()
        for target, anchor in _LINK.findall(page.read_text("utf-8"))
        if not leads_somewhere(page, target, anchor)
    ]
    assert len(pages()) > 10
    assert broken == []


def test_every_benchmark_that_a_page_names_can_be_started():
    # A record keeps the command as it was typed then: they are those with a date after it, or with
    # the commit before it that still has the program.
    commands = {
        module.rstrip(".")
        for page in pages()
        for line in page.read_text("utf-8").splitlines()
        if not re.search(r"`python -m .*`, 20\d\d-|\b[0-9a-f]{8}: python -m ", line)
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
    sorted(
        path.parent.name
        for path in BENCHMARKS.glob("*/__init__.py")
        if path.parent.name not in _NO_THEMES
    ),
)
def test_every_theme_says_what_it_measures_how_and_what_a_row_means(theme: str):
    page = text_of(f"benchmarks/{theme}/README.md")
    assert "```\n" in page, "its command"
    assert re.search(r"\*\*A row\*\*", page)


def test_every_module_of_the_benchmarks_can_be_imported_by_its_name():
    for path in BENCHMARKS.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        assert importlib.util.find_spec(name) is not None, name


def settings() -> set[str]:
    """The paths of all keys, as docs/configuration.md lists them, and of their sections."""
    sections = []
    found = set()
    for line in text_of("configuration.md").splitlines():
        if line.startswith("## "):
            # "The top level", and the records of other files, which are no settings.
            sections = re.findall(r"`([\w.]+)`", line) if line.startswith("## `") else []
        elif key := re.match(r"\| `(\w+)` \|", line):
            found |= {f"{section}.{key[1]}".removeprefix(".") for section in sections}
    return found | {path.rpartition(".")[0] for path in found}


def test_every_setting_that_a_page_names_is_one():
    known = settings() | GONE  # which the list of changes names
    tops = {key_of(field) for field in dataclasses.fields(Config)} - {"drafters", "tasks"}
    named = re.compile(rf"`((?:{'|'.join(sorted(tops))})(?:\.[a-z_]+)+)[`:=]")
    wrong = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in pages()
        if page.name != "simulate.md"  # a fleet's file has a `target`, too
        for path in named.findall(page.read_text("utf-8"))
        if path not in known and path.rpartition(".")[2] not in _NO_KEYS
    ]
    assert len(known) > 150
    assert wrong == []


def has_test(file: str, name: str) -> bool:
    """Whether there is that file, with that test, or with one."""
    path, wanted = ROOT / file, f"{name}(" if name else "test_" * ("/test_" in file)
    return path.exists() and f"def {wanted}" in path.read_text("utf-8")


def test_every_test_that_a_page_names_is_one():
    named = {
        found
        for page in pages()
        for found in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text("utf-8"))
    }
    assert len(named) > 50
    assert [found for found in named if not has_test(*found)] == []


def test_every_door_of_the_threat_model_names_the_test_that_shows_its_defence():
    page = text_of("threat-model.md")
    doors = page[page.index("## Doors") : page.index("## What is not defended")]
    rows = [line for line in doors.splitlines() if line.startswith("| ")]
    claims = [row for row in rows if not row.startswith("| what somebody tries")]
    assert len(claims) > 30
    assert [row for row in claims if "`tests/" not in row] == []


def test_the_law_that_the_page_on_exactness_shows_is_that_of_the_product():
    names = {}
    exec(text_of("exactness.md").partition("```python\n")[2].partition("```")[0], names)
    generator = np.random.default_rng(0)
    lengths = set()
    for _ in range(200):
        parents = np.array([generator.integers(-1, i) for i in range(12)], dtype=np.int32)
        tree = TokenTree(generator.integers(0, 3, 12, dtype=np.int32), parents)
        draws = generator.integers(0, 3, 13, dtype=np.int32)
        emitted = names["walk"](tree, draws)
        assert emitted == walk_draws(tree, draws)[1].tolist()
        lengths.add(len(emitted))
    assert len(lengths) > 2


def test_the_index_has_every_page():
    index = {target for target, _ in _LINK.findall(text_of("README.md"))}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - index == {"README.md"}


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120
