"""The held-out split is fixed, and disjoint from the training text."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.train.corpus import (
    HELDOUT_ONE_IN,
    Document,
    Source,
    content_hash,
    cut_excerpts,
    is_heldout,
    load_corpus,
    read_documents,
    read_excerpts,
    split,
    write_excerpts,
)
from cluster.train.html_text import html_to_text

PATHS = [f"package/module_{index}.py" for index in range(4000)]
HELDOUT_PATHS = [path for path in PATHS if is_heldout(path)]
FROZEN_HELDOUT = ["package/module_40.py", "package/module_46.py", "package/module_64.py"]
TRAIN_PATHS = [path for path in PATHS if not is_heldout(path)]


def document(path: str, text: str) -> Document:
    return Document("library", "code", path, "PSF-2.0", text)


def prose(seed: int, num_lines: int = 30) -> str:
    return "".join(
        f"line {index} of document {seed} says something that no other line says\n"
        for index in range(num_lines)
    )


def test_split_by_path_never_changes() -> None:
    # Must not change: otherwise new models train on text that earlier models were measured on.
    assert HELDOUT_PATHS[:3] == FROZEN_HELDOUT


def test_split_holds_out_about_one_in_twenty() -> None:
    expected = len(PATHS) / HELDOUT_ONE_IN
    assert 0.8 * expected < len(HELDOUT_PATHS) < 1.2 * expected


def test_both_parts_are_disjoint_by_path_and_by_content() -> None:
    corpus = split(document(path, prose(index)) for index, path in enumerate(PATHS[:400]))
    train = {content_hash(item.text) for item in corpus.train}
    heldout = {content_hash(item.text) for item in corpus.heldout}
    assert corpus.heldout
    assert len(corpus.train) + len(corpus.heldout) == 400
    assert not train & heldout
    assert all(is_heldout(item.path) for item in corpus.heldout)


def test_text_in_both_parts_leaves_the_heldout_part() -> None:
    copied = prose(1)
    corpus = split(
        [
            document(HELDOUT_PATHS[0], copied.upper()),
            document(HELDOUT_PATHS[1], prose(2)),
            document(TRAIN_PATHS[0], copied),
        ]
    )
    assert [item.path for item in corpus.train] == [TRAIN_PATHS[0]]
    assert [item.path for item in corpus.heldout] == [HELDOUT_PATHS[1]]
    assert corpus.num_duplicates == 1


def test_heldout_near_copy_of_training_text_is_dropped() -> None:
    near_copy = prose(1, num_lines=20) + prose(9, num_lines=10)
    corpus = split([document(HELDOUT_PATHS[0], near_copy), document(TRAIN_PATHS[0], prose(1))])
    assert corpus.heldout == ()


def test_reading_skips_excluded_folders_tables_and_other_encodings(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text(prose(1))
    (tmp_path / "table.py").write_text("0x00, 0x01, 0x02,\n" * 100)
    (tmp_path / "latin.py").write_bytes(prose(2).encode() + b"\xe9\xff")
    (tmp_path / "good.py").write_text(prose(3))
    source = Source(
        "library", "code", tmp_path, "*.py", "PSF-2.0", excluded=frozenset({"site-packages"})
    )
    assert [item.path for item in read_documents(source)] == ["good.py"]


def test_a_missing_corpus_names_the_packages_to_install(tmp_path: Path) -> None:
    source = Source("library", "code", tmp_path / "absent", "*.py", "PSF-2.0")
    with pytest.raises(ConfigError, match="install python3"):
        load_corpus([source])


def test_excerpts_are_bounded_repeatable_and_survive_their_file(tmp_path: Path) -> None:
    documents = [
        document(path, "\n\n".join([prose(index).strip()] * 8))
        for index, path in enumerate(PATHS[:9])
    ]
    excerpts = cut_excerpts(documents, 20, seed=3)
    assert len(excerpts) == 20
    assert all(20 <= len(item.text) <= 6000 for item in excerpts)
    assert excerpts == cut_excerpts(documents, 20, seed=3)
    assert excerpts != cut_excerpts(documents, 20, seed=4)
    write_excerpts(excerpts, tmp_path / "excerpts.jsonl")
    assert read_excerpts(tmp_path / "excerpts.jsonl") == excerpts


def test_pages_become_paragraphs_without_navigation() -> None:
    page = (
        "<html><head><title>x</title></head><body><div class='navheader'><div>Prev</div>Next</div>"
        "<h1>Name</h1><p>Two\n words &amp; more</p><pre>a\n  b</pre></body></html>"
    )
    assert html_to_text(page) == "Name\n\nTwo words & more\n\na\n  b\n"
