"""Text that a Debian machine with Python has: what the demonstration models learn, and are measured
by.

Code is the standard library of the running interpreter.  Prose is Python's documentation, from the
package `python3.11-doc`.  A part of the files is held out, chosen by a hash of their paths.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.errors import ConfigError
from cluster.train.tokenizer import ASSISTANT, END, USER

Kind = Literal["code", "prose"]
KINDS: tuple[Kind, ...] = ("code", "prose")
PATTERNS: Mapping[Kind, str] = {"code": "*.py", "prose": "*.rst.txt"}

_HELD_OUT_ONE_IN = 20
_MIN_CHARS = 200
_LONG_LINE_CHARS = 30
# Character tables and a generated copy of the documentation are no code.
_EXCLUDED = frozenset(("site-packages", "dist-packages", "pydoc_data", "encodings", "cjkencodings"))
_HEADING = re.compile(r"^(?P<heading>[^\n]{4,70})\n[=\-~^*]{4,}\n\n(?P<text>.+?)\n\n", re.M | re.S)


@dataclass(frozen=True, slots=True)
class Document:
    """One file's text.  path: relative to the folder of its kind."""

    kind: Kind
    path: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """True if the file is kept out of training."""
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


def default_roots() -> Mapping[Kind, Path]:
    """The folders of a Debian 12 machine."""
    return {
        "code": Path(sysconfig.get_paths()["stdlib"]),
        "prose": Path("/usr/share/doc/python3.11/html/_sources"),
    }


def load_corpus(roots: Mapping[Kind, Path] | None = None) -> list[Document]:
    """All documents, those to learn from first.  A text that is there twice is kept once, and one
    to be held out is dropped where more than half of its long lines are learnt elsewhere.

    Raises ConfigError where a kind has none."""
    roots = roots or default_roots()
    found: dict[str, Document] = {}
    documents = [document for kind in KINDS for document in _read(kind, roots[kind])]
    learnt_lines: set[str] = set()
    for document in sorted(documents, key=lambda each: each.is_held_out):
        lines = [" ".join(line.lower().split()) for line in document.text.splitlines()]
        long_lines = [line for line in lines if len(line) >= _LONG_LINE_CHARS]
        if not document.is_held_out:
            learnt_lines.update(long_lines)
        elif 2 * sum(line in learnt_lines for line in long_lines) > len(long_lines):
            continue
        found.setdefault("\n".join(filter(None, lines)), document)
    for kind in KINDS:
        if all(document.kind != kind for document in found.values()):
            raise ConfigError(f"no {kind} to train on under {roots[kind]}; install python3.11-doc")
    return list(found.values())


def _read(kind: Kind, root: Path) -> Iterator[Document]:
    for file in sorted(root.rglob(PATTERNS[kind])):
        relative = file.relative_to(root)
        if _EXCLUDED.intersection(relative.parts):
            continue
        try:
            text = file.read_text(encoding="utf-8").strip() + "\n"
        except UnicodeDecodeError:
            continue
        if len(text) >= _MIN_CHARS and _has_mostly_letters(text):
            yield Document(kind, relative.as_posix(), text)


def _has_mostly_letters(text: str) -> bool:
    return sum(map(str.isalpha, text)) >= 0.6 * len("".join(text.split()))


def conversations(document: Document) -> list[str]:
    """Questions that a document answers, with the answers, as the chat template writes them: a
    docstring asks for its function, a heading for the paragraph below it."""
    turns = _functions if document.kind == "code" else _sections
    return [render_turn(*turn) for turn in turns(document.text)]


def render_turn(question: str, answer: str) -> str:
    """One question and answer in the format of the chat template."""
    return f"{USER}{question}{END}{ASSISTANT}{answer}{END}"


def _functions(source: str) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        docstring = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        segment = ast.get_source_segment(source, node, padded=True) if docstring else None
        if docstring and segment and 120 <= len(segment) <= 3000:
            assert isinstance(node, ast.FunctionDef)
            summary = " ".join(docstring.split("\n\n")[0].split())
            if len(summary) <= 300:
                question = f"Write a Python function `{node.name}`: {summary}"
                yield question, textwrap.dedent(segment)


def _sections(text: str) -> Iterator[tuple[str, str]]:
    for match in _HEADING.finditer(text):
        answer = match["text"].strip()
        if 80 <= len(answer) <= 1500 and answer[0].isupper() and answer.endswith((".", ":")):
            yield f"Explain: {match['heading'].strip().replace('`', '')}", answer
