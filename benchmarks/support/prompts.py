"""Prompts of five kinds, made only from held-out text; equal in every run.

code, prose   excerpts of the held-out files
json          an array of records about excerpts, cut off inside a record
edit          an excerpt, and the request to repeat it with one name changed
chat          two turns of a conversation about an excerpt, in the model's chat template

Prompt i of a kind uses excerpt i, so all prompts differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.support.record import ROOT
from cluster.records import frozen

_MAX_LEN = 320  # tokens
_LINES = 12


@frozen
class Prompt:
    """kind: a key of KINDS.  task: value of the request's `metadata.task`."""

    kind: str
    task: str
    token_ids: tuple[int, ...]


@frozen
class Excerpt:
    kind: str
    path: str
    text: str

    def lines(self, start: int = 0) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()][start : start + _LINES]


def prompts(count: int, tokenizer: Any, kinds: Sequence[str] = ()) -> list[Prompt]:
    """`count` prompts, the kinds in turn.  tokenizer: of transformers, with a chat template."""
    kinds = kinds or list(KINDS)
    found = excerpts()
    made = []
    for index in range(count):
        kind = kinds[index % len(kinds)]
        task, build = KINDS[kind]
        made.append(Prompt(kind, task, tuple(build(found, index // len(kinds), tokenizer))))
    return made


def heldout(kind: str, count: int, tokenizer: Any, min_len: int, max_len: int) -> list[list[int]]:
    """`count` held-out prompts of `kind`, cut to token lengths spread over [min_len, max_len].

    Lengths grow geometrically, so that there are short and long prompts.
    """
    encoded = [_encode(tokenizer, each.text) for each in excerpts() if each.kind == kind]
    made = []
    for index in range(count):
        share = index / max(count - 1, 1)
        length = round(min_len * (max_len / min_len) ** share)
        ids: list[int] = []
        for offset in range(len(encoded)):  # long prompts continue with the next excerpt
            ids += encoded[(index + offset) % len(encoded)]
            if len(ids) >= length:
                break
        made.append(ids[:length])
    return made


def excerpts() -> list[Excerpt]:
    """The held-out texts that come with this repository."""
    path = ROOT / "models" / "heldout.jsonl"
    found = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [Excerpt(line["kind"], line["path"], line["text"]) for line in found]


def _long(excerpts: Sequence[Excerpt], kind: str, index: int) -> Excerpt:
    """Excerpt `index` of the long ones; beyond their number, they repeat with later starts."""
    fitting = [each for each in excerpts if each.kind == kind and len(each.lines()) >= 6]
    turn, place = divmod(index, len(fitting))
    chosen = fitting[place]
    lines = [line for line in chosen.text.splitlines(keepends=True) if line.strip()]
    start = min(3 * turn, max(len(lines) - 6, 0))
    return Excerpt(chosen.kind, chosen.path, "".join(lines[start:]))


def _plain(kind: str) -> Callable[[Sequence[Excerpt], int, Any], list[int]]:
    def build(excerpts: Sequence[Excerpt], index: int, tokenizer: Any) -> list[int]:
        ids = _encode(tokenizer, _long(excerpts, kind, index).text)
        # Lengths in turn: a third, two thirds and all of the maximum.
        return ids[: _MAX_LEN * (1 + index % 3) // 3]

    return build


def _json(excerpts: Sequence[Excerpt], index: int, tokenizer: Any) -> list[int]:
    records = []
    for offset in range(4):
        excerpt = _long(excerpts, "code" if offset % 2 else "prose", index + offset)
        lines = excerpt.lines()
        records.append(
            {"path": excerpt.path, "kind": excerpt.kind, "lines": len(lines), "first": lines[0]}
        )
    text = json.dumps(records, indent=2)
    return _encode(tokenizer, text[: text.rindex('"kind"')])[-_MAX_LEN:]


def _edit(excerpts: Sequence[Excerpt], index: int, tokenizer: Any) -> list[int]:
    lines = _long(excerpts, "code", index).lines()
    names = re.findall(r"\b[a-z_]{4,}\b", "\n".join(lines))
    name = max(sorted(set(names)), key=names.count) if names else "self"
    renamed = re.sub(rf"\b{name}\b", f"new_{name}", lines[0])
    text = "\n".join([*lines, "", f"# The same again, with {name} renamed to new_{name}:", renamed])
    return _encode(tokenizer, text + "\n")[-_MAX_LEN:]


def _chat(excerpts: Sequence[Excerpt], index: int, tokenizer: Any) -> list[int]:
    excerpt = _long(excerpts, "code", index)
    first, second = excerpt.lines()[: _LINES // 2], excerpt.lines(_LINES // 2)
    messages = [
        {"role": "user", "content": f"Write the beginning of {excerpt.path}."},
        {"role": "assistant", "content": "\n".join(first)},
        {"role": "user", "content": "Go on, and repeat the imports.\n" + "\n".join(second[:2])},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return _encode(tokenizer, text)[-_MAX_LEN:]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# Task and builder of each kind.
KINDS: dict[str, tuple[str, Callable[[Sequence[Excerpt], int, Any], list[int]]]] = {
    "code": ("code", _plain("code")),
    "prose": ("prose", _plain("prose")),
    "json": ("default", _json),
    "edit": ("code", _edit),
    "chat": ("default", _chat),
}
