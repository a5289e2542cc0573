"""Makes conversations from the corpus, so that the models learn the chat template."""

from __future__ import annotations

import ast
import random
import re
import textwrap
from collections.abc import Iterable, Iterator

from cluster.train.corpus import Document
from cluster.train.tokenizer import ASSISTANT, END, SYSTEM, USER

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful programmer. Answer with Python code.",
    "Answer briefly and precisely.",
)
_CODE_REQUESTS = (
    "Write a Python function `{name}`: {summary}",
    "Write a Python function `{name}({arguments})`. {summary}",
    "Implement `{name}` in Python. {summary}",
)
_SECTION_REQUESTS = (
    "Explain: {heading}",
    "What does the documentation say about {heading}?",
    "{heading}",
)
_CONTINUE_REQUESTS = ("Continue: {text}", "Continue this text.\n\n{text}")
_RST_HEADING = re.compile(r"^(?P<heading>[^\n]{4,70})\n[=\-~^*]{4,}\n\n", re.MULTILINE)


def conversations(documents: Iterable[Document], seed: int, max_chars: int) -> list[str]:
    """Chat texts of about `max_chars` characters in total, from training documents only."""
    generator = random.Random(seed)
    turns = [turn for document in documents for turn in _turns(document, generator)]
    generator.shuffle(turns)
    texts: list[str] = []
    num_chars = 0
    while turns and num_chars < max_chars:
        num_turns = 2 if generator.random() < 0.15 and len(turns) > 1 else 1
        text = "".join(render_turn(*turns.pop()) for _ in range(num_turns))
        if generator.random() < 0.25:
            text = f"{SYSTEM}{generator.choice(_SYSTEM_PROMPTS)}{END}{text}"
        texts.append(text)
        num_chars += len(text)
    return texts


def render_turn(question: str, answer: str) -> str:
    """One question and answer in the format of the chat template."""
    return f"{USER}{question}{END}{ASSISTANT}{answer}{END}"


def _turns(document: Document, generator: random.Random) -> Iterator[tuple[str, str]]:
    if document.kind == "code":
        if "test" not in document.path:
            yield from _function_turns(document.text, generator)
    else:
        yield from _section_turns(document.text, generator)
        yield from _continuation_turns(document.text, generator)


def _function_turns(source: str, generator: random.Random) -> Iterator[tuple[str, str]]:
    """Requests made from docstrings, answered by the documented functions."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node)
        segment = ast.get_source_segment(source, node, padded=True)
        if not docstring or segment is None or not 120 <= len(segment) <= 3000:
            continue
        summary = " ".join(docstring.split("\n\n")[0].split())
        arguments = ", ".join(argument.arg for argument in node.args.args)
        request = generator.choice(_CODE_REQUESTS)
        question = request.format(name=node.name, arguments=arguments, summary=summary)
        if len(question) <= 400:
            yield question, textwrap.dedent(segment)


def _section_turns(text: str, generator: random.Random) -> Iterator[tuple[str, str]]:
    """Questions about section headings, answered by the first paragraphs of the section."""
    for match in _RST_HEADING.finditer(text):
        heading = match["heading"].strip().replace("`", "")
        answer = _prose_paragraphs(text[match.end() : match.end() + 4000])
        if answer:
            yield generator.choice(_SECTION_REQUESTS).format(heading=heading), answer


def _continuation_turns(text: str, generator: random.Random) -> Iterator[tuple[str, str]]:
    paragraphs = text.split("\n\n")
    for index in range(0, len(paragraphs) - 1, 4):
        first, second = paragraphs[index].strip(), paragraphs[index + 1].strip()
        if _is_sentence(first) and _is_sentence(second):
            yield generator.choice(_CONTINUE_REQUESTS).format(text=first), second


def _prose_paragraphs(text: str) -> str:
    """The leading paragraphs that consist of sentences, at most three."""
    chosen: list[str] = []
    for paragraph in text.split("\n\n")[:3]:
        if not _is_sentence(paragraph):
            break
        chosen.append(paragraph.strip())
    return "\n\n".join(chosen)


def _is_sentence(paragraph: str) -> bool:
    return (
        80 <= len(paragraph) <= 1500
        and paragraph[0].isupper()
        and paragraph.rstrip().endswith((".", ":"))
    )
