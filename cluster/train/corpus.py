"""Training text from the files of a Debian machine with Python, and its fixed held-out split.

Code is the standard library of the running interpreter. Prose is the documentation of Python
(reStructuredText) and of PostgreSQL (HTML, rendered to plain text), from the packages
`python3.11-doc` and `postgresql-doc-15`.
"""

from __future__ import annotations

import hashlib
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from cluster.errors import ConfigError
from cluster.train.html_text import html_to_text

Kind = Literal["code", "prose"]
KINDS: tuple[Kind, ...] = ("code", "prose")

HELDOUT_ONE_IN = 20
MIN_DOCUMENT_CHARS = 200
# A held-out file that shares more than this part of its long lines with training is a copy.
MAX_SHARED_LINES = 0.5
LONG_LINE_CHARS = 30


@dataclass(frozen=True, slots=True)
class Source:
    """A folder of documents of one kind, without the folders in `excluded`."""

    name: str
    kind: Kind
    root: Path
    pattern: str
    licence: str
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Document:
    """One file's text; `path` is relative to the root of its source and determines the split."""

    source: str
    kind: Kind
    path: str
    licence: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out documents, disjoint by path and by content."""

    train: tuple[Document, ...]
    heldout: tuple[Document, ...]
    num_duplicates: int


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A held-out prompt with its origin and licence."""

    kind: Kind
    source: str
    path: str
    licence: str
    text: str


def default_sources() -> tuple[Source, ...]:
    """The folders of the corpus on a Debian 12 machine."""
    return (
        Source(
            name="python-standard-library",
            kind="code",
            root=Path(sysconfig.get_paths()["stdlib"]),
            pattern="*.py",
            licence="PSF-2.0",
            # Excludes character tables and a generated copy of the documentation: not code.
            excluded=frozenset(
                {"site-packages", "dist-packages", "pydoc_data", "encodings", "cjkencodings"}
            ),
        ),
        Source(
            name="python-documentation",
            kind="prose",
            root=Path("/usr/share/doc/python3.11/html/_sources"),
            pattern="*.rst.txt",
            licence="PSF-2.0",
        ),
        Source(
            name="postgresql-documentation",
            kind="prose",
            root=Path("/usr/share/doc/postgresql-doc-15/html"),
            pattern="*.html",
            licence="PostgreSQL",
        ),
    )


def is_heldout(path: str) -> bool:
    """Whether the file at `path`, relative to its source's root, is held out of training."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0


def read_documents(source: Source) -> Iterator[Document]:
    """The usable files of a source, sorted by path; nothing if the root is missing."""
    for file in sorted(source.root.rglob(source.pattern)):
        relative = file.relative_to(source.root)
        if source.excluded.intersection(relative.parts) or not file.is_file():
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if file.suffix == ".html":
            text = html_to_text(text)
        text = text.replace("\r\n", "\n").strip() + "\n"
        if _is_readable(text):
            yield Document(source.name, source.kind, relative.as_posix(), source.licence, text)


def split(documents: Iterable[Document]) -> Corpus:
    """Split by path; drop duplicates and held-out documents that the training text contains."""
    train: list[Document] = []
    heldout: list[Document] = []
    seen: set[bytes] = set()
    num_duplicates = 0
    # Training files come first, so a document in both parts is dropped from the held-out part.
    for document in sorted(
        documents, key=lambda item: (is_heldout(item.path), item.source, item.path)
    ):
        digest = content_hash(document.text)
        if digest in seen:
            num_duplicates += 1
            continue
        seen.add(digest)
        (heldout if is_heldout(document.path) else train).append(document)
    train_lines = {line for document in train for line in _long_lines(document.text)}
    honest = [document for document in heldout if not _is_near_copy(document.text, train_lines)]
    return Corpus(tuple(train), tuple(honest), num_duplicates + len(heldout) - len(honest))


def load_corpus(sources: Iterable[Source] | None = None) -> Corpus:
    """Read and split the sources, by default those of this machine."""
    chosen = default_sources() if sources is None else tuple(sources)
    corpus = split(document for source in chosen for document in read_documents(source))
    if not corpus.train:
        roots = ", ".join(str(source.root) for source in chosen)
        raise ConfigError(
            f"no training text under {roots}; install python3.11-doc and postgresql-doc-15"
        )
    return corpus


def heldout_prompts(kind: Kind, count: int, seed: int) -> tuple[Excerpt, ...]:
    """`count` held-out excerpts of 20 to 6000 characters; the same seed gives the same excerpts."""
    documents = [document for document in load_corpus().heldout if document.kind == kind]
    return cut_excerpts(documents, count, seed)


def cut_excerpts(documents: list[Document], count: int, seed: int) -> tuple[Excerpt, ...]:
    """Excerpts that start at a paragraph and end at a line or word; all starts differ."""
    if not documents:
        raise ConfigError("no held-out documents of this kind; see `drafthouse train corpus`")
    generator = random.Random(seed)
    excerpts: list[Excerpt] = []
    used: set[tuple[str, int]] = set()
    for _ in range(100 * count):
        if len(excerpts) == count:
            break
        document = generator.choice(documents)
        starts = _paragraph_starts(document.text)
        start = generator.choice(starts)
        length = int(20 * 300 ** generator.random())  # log-uniform from 20 to 6000
        text = document.text[start : start + length]
        text = text[: text.rfind("\n" if "\n" in text[20:] else " ")]
        if len(text.strip()) < 20 or (document.path, start) in used:
            continue
        used.add((document.path, start))
        excerpts.append(
            Excerpt(document.kind, document.source, document.path, document.licence, text)
        )
    return tuple(excerpts)


def write_excerpts(excerpts: Iterable[Excerpt], file: Path) -> None:
    """One JSON object per line."""
    file.write_text(
        "".join(json.dumps(asdict(excerpt), ensure_ascii=False) + "\n" for excerpt in excerpts),
        encoding="utf-8",
    )


def read_excerpts(file: Path) -> tuple[Excerpt, ...]:
    """The excerpts that `write_excerpts` wrote."""
    if not file.exists():
        raise ConfigError(
            f"{file}: no such file; write it with `drafthouse train corpus --excerpts`"
        )
    with file.open(encoding="utf-8") as lines:
        return tuple(Excerpt(**json.loads(line)) for line in lines)


def content_hash(text: str) -> bytes:
    """A hash that ignores case and white space."""
    return hashlib.sha256(" ".join(text.lower().split()).encode()).digest()


def _is_readable(text: str) -> bool:
    """Whether the text is not tiny, has mostly letters, and has line breaks."""
    num_visible = len("".join(text.split()))
    num_letters = sum(map(str.isalpha, text))
    mean_line_len = len(text) / (text.count("\n") + 1)
    return (
        len(text) >= MIN_DOCUMENT_CHARS
        and num_letters >= 0.6 * num_visible
        and mean_line_len <= 2000
    )


def _long_lines(text: str) -> list[str]:
    lines = (" ".join(line.lower().split()) for line in text.splitlines())
    return [line for line in lines if len(line) >= LONG_LINE_CHARS]


def _is_near_copy(text: str, train_lines: set[str]) -> bool:
    lines = _long_lines(text)
    return bool(lines) and sum(line in train_lines for line in lines) > MAX_SHARED_LINES * len(
        lines
    )


def _paragraph_starts(text: str) -> list[int]:
    starts = [0]
    position = text.find("\n\n")
    while 0 <= position < len(text) - 400:
        start = position + 2
        if not text[start].isspace():
            starts.append(start)
        position = text.find("\n\n", start)
    return starts
