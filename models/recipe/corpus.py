"""Text that a Debian machine with Python has: what the demonstration models learn, and are measured
by.

Code is the standard library of the running interpreter.  Prose is Python's documentation, from the
package `python3.11-doc`.  A part of the files is held out, chosen by a hash of their paths.
Training reads them as token streams, in an order that a seed fixes.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cluster.errors import ConfigError
from cluster.records import frozen

# One byte-level BPE vocabulary of 4096 tokens, shared by the target and all drafters.


VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, SYSTEM, USER, ASSISTANT, END)
MAX_CONTEXT_LEN = 4096

# Words keep one leading space. A line break forms one piece with the indentation after it, which is
# frequent in code. Digits are single pieces so that numbers do not fill the vocabulary.
_SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+[ \t]*|[ \t]+(?=\S)|\s+"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('unknown role ' + message['role'] + '; use system, user or assistant') -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Learn the merges from `texts`; special tokens take the first ids in the order given."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return wrap(tokenizer)


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Wrap a trained vocabulary for transformers, with special tokens and the chat template."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, END],
        model_max_length=MAX_CONTEXT_LEN,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which contains the chat template."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only", "backend"):
        config.pop(key, None)
    # A class name that every release of transformers knows; version 5 writes an internal one.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


Kind = Literal["code", "prose"]
Tokens = NDArray[np.uint16]
KINDS: tuple[Kind, ...] = ("code", "prose")
PATTERNS: Mapping[Kind, str] = {"code": "*.py", "prose": "*.rst.txt"}

_HELD_OUT_ONE_IN = 20
_ENCODE_BATCH = 256
_MIN_CHARS = 200
_LONG_LINE_CHARS = 30
# Character tables and a generated copy of the documentation are no code.
_EXCLUDED = frozenset(("site-packages", "dist-packages", "pydoc_data", "encodings", "cjkencodings"))
_HEADING = re.compile(r"^(?P<heading>[^\n]{4,70})\n[=\-~^*]{4,}\n\n(?P<text>.+?)\n\n", re.M | re.S)


@frozen
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


def encode_documents(texts: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> Tokens:
    """All texts concatenated, each followed by the end-of-text token."""
    end_id = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    pieces, waiting = [np.zeros(0, np.uint16)], list(texts)
    for start in range(0, len(waiting), _ENCODE_BATCH):
        for encoding in tokenizer.backend_tokenizer.encode_batch(
            waiting[start : start + _ENCODE_BATCH], add_special_tokens=False
        ):
            pieces.append(np.array([*encoding.ids, end_id], dtype=np.uint16))
    return np.concatenate(pieces)


@frozen
class WindowOrder:
    """Windows of `length` + 1 tokens over several streams, in an order fixed by the seed.

    Windows overlap by one token, so that each token of an epoch is predicted once.  Every epoch
    shifts and shuffles the windows again.  The order depends only on the seed, so a resumed run
    needs only the number of windows it has read.
    """

    streams: Sequence[Tokens]
    length: int
    seed: int

    def __post_init__(self) -> None:
        if all(len(stream) <= self.length + 1 for stream in self.streams):
            raise ConfigError(f"every stream is shorter than one window of {self.length} tokens")

    def windows_per_epoch(self) -> int:
        return len(self._cuts(0))

    def read(self, first: int, count: int) -> torch.Tensor:
        """Windows `first` to `first + count` of the endless order: int64[count, length + 1]."""
        rows: list[NDArray[np.int64]] = []
        per_epoch = self.windows_per_epoch()
        while len(rows) < count:
            epoch, index = divmod(first + len(rows), per_epoch)
            cuts = self._cuts(epoch)
            for stream_index, start in cuts[index : index + count - len(rows)]:
                window = self.streams[stream_index][start : start + self.length + 1]
                rows.append(np.asarray(window, dtype=np.int64))
        return torch.from_numpy(np.stack(rows))

    def _cuts(self, epoch: int) -> NDArray[np.int64]:
        """int64[n, 2]: stream index and start of each window of an epoch, shuffled."""
        generator = np.random.default_rng((self.seed, self.length, epoch))
        shift = int(generator.integers(self.length))
        parts: list[NDArray[np.int64]] = []
        for index, stream in enumerate(self.streams):
            # One window fewer than fits, so that the number of windows is the same for every shift.
            num_windows = max(0, (len(stream) - 1) // self.length - 1)
            starts = shift + self.length * np.arange(num_windows, dtype=np.int64)
            parts.append(np.stack([np.full_like(starts, index), starts], axis=1))
        cuts = np.concatenate(parts)
        generator.shuffle(cuts)
        return cuts
