"""Every format of tool calls, read in any pieces."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.grammar.lark import structural_tag_to_lark
from cluster.requests.fields import GrammarSpec
from cluster.text.answer import AnswerReader
from cluster.text.dialect import FORMATS, format_of
from cluster.text.prompt import ChatUse
from cluster.text.tool_calls.base import Part
from tests.support.grammar.specs import compiler
from tests.support.text.answers import deepseek, parts_of

ARGUMENTS = {"city": 'Köln "}{"', "days": [1, {"a": "\\"}]}
WRITTEN = json.dumps(ARGUMENTS)
Calls = list[tuple[str, Any]]
TWO = [("weather", ARGUMENTS), ("time", {})]
CASES = [
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {WRITTEN}}}\n</tool_call>\n'
        '<tool_call>{"name": "time", "arguments": {}}</tool_call>',
        "Let me see.\n",
        TWO,
    ),
    (
        "hermes",
        f'<tool_call>{{"arguments": {WRITTEN}, "name": "weather"}}</tool_call>',
        "",
        TWO[:1],
    ),
    *[
        ("hermes", text, text, [])
        for text in (
            "1 < 2 and <tool is no marker",
            "a lone </tool_call> is none",
            " <tool_call> is none",
            '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>\n',
            " \n",
        )
    ],
    (
        "hermes",
        '\n<tool_call>{"name": "time", "arguments": {}, "id": "1"}\n</tool_call>\nAfter:\n\n  x\n',
        "\nAfter:\n\n  x\n",
        TWO[1:],
    ),
    (
        "hermes",
        '<tool_call>{"name": "time", "arguments": {}</tool_call> is lenient',
        " is lenient",
        TWO[1:],
    ),
    (
        "llama3",
        f'<|python_tag|>{{"name": "weather", "parameters": {WRITTEN}}}; '
        '{"name": "time", "parameters": {}}',
        "",
        TWO,
    ),
    ("llama3", f'\n{{"name": "weather", "parameters": {WRITTEN}}}', "", TWO[:1]),
    ("llama3", "The answer is {x}.", "The answer is {x}.", []),
    ("llama3", ' {"answer": 5}; ', ' {"answer": 5}; ', []),
    ("llama3", '{"name": "time", "parameters": {}}; so,  yes ', "; so,  yes ", TWO[1:]),
    (
        "mistral",
        f'Well: [TOOL_CALLS][{{"name": "weather", "arguments": {WRITTEN}}}, '
        '{"name": "time", "arguments": {}}]',
        "Well: ",
        TWO,
    ),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{WRITTEN}[TOOL_CALLS]time[ARGS]{{}}", "", TWO),
    *[
        ("mistral", text, text, [])
        for text in ("[TOOL] is no marker", "[TOOL_CALLS][1, 2] x", "[TOOL_CALLS] prose {x")
    ],
    ("mistral", '[TOOL_CALLS] [{"name": "time", "arguments": {}}] tail', " tail", TWO[1:]),
    (
        "deepseek",
        deepseek(
            "Sure. <|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>weather\n"
            f"```json\n{WRITTEN}\n```<|tool_call_end|>\n<|tool_call_begin|>function<|tool_sep|>"
            "time\n```json\n{}\n```<|tool_call_end|><|tool_calls_end|>"
        ),
        "Sure. ",
        TWO,
    ),
    (
        "deepseek",
        deepseek(
            "<|tool_calls_begin|><|tool_call_begin|>weather<|tool_sep|>"
            f"{WRITTEN}<|tool_call_end|><|tool_calls_end|>"
        ),
        "",
        TWO[:1],
    ),
    *[
        ("deepseek", text, text, [])
        for text in ("a < b", "See:\n```\nx\n```", deepseek("a <|tool_call_end|> b"))
    ],
    (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{WRITTEN}<|call|>"
        "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>done",
        "done",
        TWO,
    ),
    ("harmony", "<|channel|>final<|message|>a < b<|return|>", "a < b", []),
    ("harmony", "<|channel|>final<|message|> a<|end|><|start|>assistant<|channel|>an", " a", []),
    ("harmony", "no channel at all", "no channel at all", []),
]


def collect(parts: Sequence[Part]) -> tuple[str, Calls, str]:
    calls: dict[int, tuple[str, str]] = {}
    for piece in (part for part in parts if part.is_call):
        if piece.name is not None:
            assert piece.index == len(calls)
            calls[piece.index] = piece.name, ""
        name, written = calls[piece.index]
        calls[piece.index] = name, written + piece.text
    found = [(name, json.loads(written)) for name, written in calls.values()]
    answer = "".join(part.text for part in parts if part.kind == "text")
    return answer, found, "".join(part.text for part in parts if part.kind == "reasoning")


def read(name: str, pieces: Sequence[str]) -> tuple[str, Calls, str]:
    return collect(parts_of(name, *pieces))


@pytest.mark.parametrize(("name", "text", "answer", "calls"), CASES)
def test_calls_are_found_in_any_pieces(name: str, text: str, answer: str, calls: Calls):
    generator = random.Random(0)
    divided = [[text]]
    for size in (1, 2, 3, 5, 8):
        divided.append([text[at : at + size] for at in range(0, len(text), size)])
    for _ in range(20):
        cuts = sorted(generator.sample(range(len(text)), min(6, len(text))))
        divided.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    for pieces in divided:
        assert read(name, pieces) == (answer, calls, "hm" if "analysis" in text else "")


# Layout, escapes and characters as no encoder of ours writes them.
ODD = '{ "city" :"Zürich 東京 🙂\\u00fc\\/", "n":[1.50,\t-0] , "m":{}}'
HERMES_ODD = [
    f'<tool_call>{{"name": "f", "arguments": {ODD}}}</tool_call>',
    f'<tool_call>{{ "arguments" :{ODD} , "name": "f"}}</tool_call>',
    f'<tool_call>{{"id": {{"a": [1]}}, "name": "f", "arguments": {ODD}, "x": ","}}</tool_call>',
    f'<tool_call>{{"arguments": 1, "parameters": 2, "arguments": {ODD}, "name": "f"}}</tool_call>',
]
WRITTEN_ODDLY = [
    *(("hermes", text) for text in HERMES_ODD),
    ("llama3", f'{{"parameters": {ODD}, "name": "f"}}'),
    ("llama3", f'{{"name": "f", "parameters": {ODD}}}'),
    ("mistral", f'[TOOL_CALLS][{{"arguments": {ODD}, "name": "f"}}]'),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{ODD}"),
    ("deepseek", deepseek(f"<|tool_call_begin|>f<|tool_sep|>{ODD}")),
    ("harmony", f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ODD}<|call|>"),
]


@pytest.mark.parametrize(("name", "text"), WRITTEN_ODDLY)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_arguments_are_passed_on_as_they_were_written(name: str, text: str, size: int):
    parts = parts_of(name, *(text[at : at + size] for at in range(0, len(text), size)))
    calls = [part for part in parts if part.is_call]
    assert {part.name for part in calls if part.name} == {"f"}
    assert "".join(part.text for part in calls) == ODD


@pytest.mark.parametrize("name", ["hermes", "llama3", "harmony"])
def test_arguments_come_while_they_are_written(name: str):
    text = next(text for each, text, _, calls in CASES if each == name and calls)
    parser = AnswerReader(FORMATS[name].read, ChatUse(reads_calls=True))
    parts = [part for character in text for part in parser.push(character)]
    written = [part for part in parts if part.is_call and part.text]
    assert len(written) > len(WRITTEN) / 2


@pytest.mark.parametrize(("name", "text", "answer", "calls"), CASES)
def test_a_text_that_breaks_off_is_read_as_far_as_it_goes(
    name: str, text: str, answer: str, calls: Calls
):
    for length in range(len(text)):
        parts = parts_of(name, text[:length])
        names = [part.name for part in parts if part.is_call and part.name]
        assert names == [each for each, _ in calls][: len(names)]


TEMPLATES = {
    "hermes": "{% if tools %}<tool_call>{% endif %}",
    "llama3": "{% if tools %}<|python_tag|>{% endif %}",
    "mistral": "{% if tools %}[TOOL_CALLS]{% endif %}",
    "deepseek": deepseek("{% if tools %}<|tool_calls_begin|>{% endif %}"),
    "harmony": "{% if tools %}<|channel|>commentary{% endif %}",
}


def test_the_format_is_known_by_the_template():
    assert set(TEMPLATES) == set(FORMATS)
    for name, template in TEMPLATES.items():
        assert format_of(template) is FORMATS[name]
    assert format_of("{{ messages }}") is None
    assert format_of("<tool_call>") is None


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"harmony"}))
@pytest.mark.parametrize("is_required", [False, True])
def test_what_the_grammar_allows_is_what_the_parser_reads(name: str, is_required: bool):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    call = FORMATS[name]
    source = call.grammar([("go", schema)], is_required=is_required, is_parallel=True)
    compiler().compile(GrammarSpec("structural_tag", source))
    before, after = call.tags("go")
    text = call.begin + before + '{"a": 1}' + after + call.end
    assert read(name, [text])[:2] == ("", [("go", {"a": 1})])
    specials = {} if name == "hermes" else {call.trigger: 7}
    assert "start:" in structural_tag_to_lark(json.loads(source), specials)
