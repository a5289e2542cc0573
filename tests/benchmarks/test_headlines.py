"""A headline figure is of a recent build, and says of how many answers it is and how sure."""

from pathlib import Path

import pytest

from benchmarks.headlines import PAGES, complaints
from tests.conftest import said_by

GOOD = "* **1.30 (1.20 to 1.41) times** plain, 168 answers\n  ([record](docs/record.md))\n"
RECORD = (
    "`python -m x`, 2026-11-27, commit {commit}, {commit}+, AMD EPYC, 2 cores, Python 3.11.7.\n"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A record of the first commit, and three changes of the engine after it."""

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return said_by("git", *identity, *words, folder=tmp_path).strip()

    git("init", "-q")
    engine = tmp_path / "cluster" / "engine" / "engine.py"
    engine.parent.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    for number in range(4):
        engine.write_text(f"{number}\n")
        git("add", "-A")
        git("commit", "-qm", "a change")
    (first,) = git("rev-list", "--max-parents=0", "--abbrev-commit", "HEAD").split()
    (tmp_path / "docs" / "record.md").write_text(RECORD.format(commit=first))
    write(tmp_path, GOOD)
    return tmp_path


def write(checkout: Path, items: str) -> None:
    for page in PAGES:
        (checkout / page).write_text("On an AMD EPYC:\n\n")
    (checkout / "README.md").write_text(f"On an AMD EPYC:\n\n{items}\nAnd more.\n")


def complaint(checkout: Path, most_commits: int = 3) -> str:
    (found,) = complaints(checkout, most_commits)
    return found


def test_a_headline_of_a_recent_build_stands_and_one_of_an_old_build_does_not(
    checkout: Path,
):
    assert list(complaints(checkout, most_commits=3)) == []
    old = complaint(checkout, most_commits=2)
    assert "3 commits before the last change of cluster/engine" in old
    (checkout / "docs" / "later.md").write_text("what changes no figure ages no record\n")
    assert list(complaints(checkout, most_commits=3)) == []


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        (", 168 answers", "", "of how many answers"),
        (" (1.20 to 1.41)", "", "how sure it is"),
        ("docs/record.md", "docs/none.md", "links no record"),
        ("([record](docs/record.md))", "(measured)", "links no record"),
    ],
)
def test_a_headline_that_leaves_out_what_it_rests_on_is_refused(
    checkout: Path, old: str, new: str, wrong: str
):
    write(checkout, GOOD.replace(old, new))
    assert wrong in complaint(checkout)


def test_a_record_of_another_processor_or_history_is_refused(checkout: Path):
    record = checkout / "docs" / "record.md"
    text = record.read_text()
    record.write_text(text.replace("AMD EPYC", "Intel Xeon"))
    assert "the processor was 'Intel Xeon'" in complaint(checkout)
    record.write_text(RECORD.format(commit="0123456"))
    assert "commit 0123456 of its record is none of this history" in complaint(checkout)


def test_a_figure_in_the_text_is_no_headline(checkout: Path):
    write(checkout, "An older build had **1.69 times** plain, 338 commits ago.\n")
    assert list(complaints(checkout, most_commits=0)) == []
