"""What cannot be compiled is refused with its reason; what can is compiled once."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster.config.schema import AnswersConfig
from cluster.grammar.compiler import GrammarCompiler
from cluster.requests.fields import GrammarSpec
from tests.support.errors import request_error
from tests.support.grammar.specs import (
    FOLDER,
    SPECS,
    allowed,
    compiler,
    compiler_over,
    eos,
    ids_of,
    open_text,
)

BAD = {
    "no json": GrammarSpec("json_schema", "{"),
    "no schema": GrammarSpec("json_schema", '{"type": 5}'),
    "unclosed regex": GrammarSpec("regex", "(a"),
    "no rule": GrammarSpec("grammar", "start: missing"),
    "gbnf": GrammarSpec("grammar", "root ::= missing"),
    "no kind": GrammarSpec("poem", "x"),
    "no tag": GrammarSpec("structural_tag", '{"type": "structural_tag", "format": {"type": "z"}}'),
}


@pytest.mark.parametrize("spec", BAD.values(), ids=BAD)
def test_a_bad_grammar_is_the_requests_fault(spec: GrammarSpec):
    for _ in range(2):
        with request_error("the grammar cannot be used") as caught:
            compiler().compile(spec)
        assert caught.value.param == "grammar"
        assert len(caught.value.message) < 400


# Each is small as a text, and found to be too large when a text of it begins.
TOO_LARGE = {
    "regex": (GrammarSpec("regex", "(a?){300}a{300}"), "too many expressions"),
    "terminal": (
        GrammarSpec("grammar", "start: T\nT: /.*a.{14}/ & /.*b.{15}/ & /.*c.{13}/"),
        "too many expressions",
    ),
    "rule": (
        GrammarSpec("grammar", f"start: {' | '.join(f'/{n}/ b' for n in range(3000))}\nb: /b/"),
        "max is 2000",
    ),
    "schema": (
        GrammarSpec(
            "json_schema",
            json.dumps({"type": "object", "properties": {f"p{n}": {} for n in range(2500)}}),
        ),
        "max is 2000",
    ),
    "endless": (GrammarSpec("grammar", 'root ::= "a" root'), "limit 50000"),
}


@pytest.mark.parametrize(("spec", "limit"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_grammar_that_is_too_large_is_refused_before_its_first_token(
    spec: GrammarSpec, limit: str
):
    with request_error(rf"cannot be used: it is too large: .*{limit}"):
        compiler().compile(spec)


CHOICES = {
    "numbers": [str(number) for number in range(1, 4097)],
    "one prefix": [f"/usr/share/{number}.txt" for number in range(4096)],
    "no prefix": [f"{number * 7919 % 4096} of many" for number in range(4096)],
    "prefixes of others": ["a" * length for length in range(1, 400)],
    "empty": ["", "yes", "yes, sir"],
    "Unicode": [f"é🙂東京 {number}" for number in range(2000)],
    "signs": ['"', "\\", "/", "a\nb", "|", "\x00"],
}


@pytest.mark.parametrize("texts", CHOICES.values(), ids=CHOICES)
def test_any_of_thousands_of_choices_may_be_written(texts: list[str]):
    spec = GrammarSpec("choice", json.dumps(texts))
    for wanted in (texts[0], texts[1], texts[len(texts) // 2], texts[-1]):
        text = open_text(spec)
        for token in ids_of(wanted):
            assert token in allowed(text)
            assert text.push(token)
        assert text.push(eos()[0])
    other = open_text(spec)
    assert not all(map(other.push, [*ids_of(texts[1] + " no"), *eos()]))


def test_a_long_source_is_refused_before_it_is_read():
    small = GrammarCompiler(FOLDER, AnswersConfig(max_grammar_bytes=10), 5000, ())
    with request_error(r"has 11 bytes, the limit is 10.*max_grammar_bytes"):
        small.compile(GrammarSpec("regex", "é" * 5 + "a"))


def test_a_folder_without_a_tokenizer_serves_no_grammars(tmp_path: Any):
    with request_error("grammars are not served"):
        GrammarCompiler(tmp_path, AnswersConfig(), 5000, ()).compile(SPECS["regex"])


class Slow:
    """A library that waits for a word."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.compiled = []

    def compile(self, spec: GrammarSpec) -> Any:
        self.compiled.append(spec.source)
        assert self.go.wait(10)
        if spec.source == "broken":
            raise ValueError("a defect")
        return object()


def test_a_grammar_that_many_want_is_compiled_once():
    slow = Slow()
    shared = compiler_over(slow)
    spec = GrammarSpec("regex", "a")
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(shared.compile, spec) for _ in range(4)]
        slow.go.set()
    first, *others = (each.result() for each in running)
    assert slow.compiled == ["a"]
    assert others == [first] * 3


def test_only_so_many_are_kept():
    slow = Slow()
    slow.go.set()
    shared = compiler_over(slow)
    specs = [GrammarSpec("regex", str(number)) for number in range(200)]
    for spec in specs:
        shared.compile(spec)
    for spec in [*reversed(specs[-128:]), specs[0]]:
        shared.compile(spec)
    assert slow.compiled == [spec.source for spec in (*specs, specs[0])]


def test_a_defect_of_the_library_leaves_nobody_waiting():
    slow = Slow()
    slow.go.set()
    shared = compiler_over(slow)
    for _ in range(2):
        with request_error("cannot be compiled"):
            shared.compile(GrammarSpec("regex", "broken"))
