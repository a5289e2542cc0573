"""An answer is the same in every API, whole and streamed, whatever pieces its tokens come in.

Speculation groups tokens as drafts are accepted, so text that depended on the grouping would depend
on the drafts.
"""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.schema import CoordinatorConfig
from cluster.core import FinishReason
from cluster.text.dialect import FORMATS
from cluster.text.prompt import ChatUse
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.choice import Delta
from deployments.ingress.coordinators import Coordinators
from deployments.ingress.generation import Generation
from deployments.ingress.openai_request import Chat
from deployments.ingress.openai_response import Answer
from tests.deployments.test_openai_request import LIMITS, chat
from tests.support.text.answers import (
    ARGUMENTS,
    PROMPTS,
    WRITTEN,
    Apis,
    Asked,
    asked,
    parts_of,
    read_answer,
    texts_of,
)
from tests.support.text.tokenizers_for_tests import byte_level_folder

every_format = pytest.mark.parametrize("name", sorted(FORMATS))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_level_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def apis(tokenizer: Tokenizer) -> Apis:
    return Apis(tokenizer)


@pytest.fixture(scope="module")
def tokens_of(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """The text in tokens of one byte each, which may divide a character."""
    ids = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    return lambda text: [ids[bytes([byte])] for byte in text.encode()]


def answers(name: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(texts_of(name)), max_size=12).map("".join)


@st.composite
def ways(draw: st.DrawFn, name: str) -> Asked:
    """Ways to read an answer, with and without reasoning and stop strings."""
    stops = st.sampled_from(["slo", "</tool_call>", "\n\n", "}", '": "', " ", "é", "Yes", "<"])
    return asked(
        name,
        is_reasoning=draw(st.booleans()),
        use=ChatUse(
            reads_calls=draw(st.booleans()) or draw(st.booleans()),
            is_forced=draw(st.booleans()),
            is_parallel=draw(st.booleans()),
            shows_reasoning=draw(st.booleans()),
        ),
        prompt_ids=draw(st.sampled_from(PROMPTS)),
        stop=tuple(draw(st.lists(stops, max_size=2))),
        end=draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])),
    )


def cut(tokens: list[int], places: list[int]) -> list[list[int]]:
    borders = [0, *sorted(place % (len(tokens) + 1) for place in places), len(tokens)]
    return [tokens[start:end] for start, end in pairwise(borders)]


@every_format
@given(data=st.data())
def test_any_pieces_of_an_answer_give_the_same_messages(
    name: str,
    tokenizer: Tokenizer,
    apis: Apis,
    tokens_of: Callable[[str], list[int]],
    data: st.DataObject,
):
    text, way = data.draw(answers(name)), data.draw(ways(name))
    places = data.draw(st.lists(st.integers(0, 500), max_size=8))
    tokens = tokens_of(text)
    whole = read_answer(tokenizer, way, [tokens])
    expected = apis.whole(whole)
    assert apis.streamed(whole) == expected
    for events in (cut(tokens, places), [[token] for token in tokens] or [[]]):
        deltas = read_answer(tokenizer, way, events)
        assert apis.whole(deltas) == expected
        assert apis.streamed(deltas) == expected


@every_format
@given(data=st.data())
def test_what_is_no_call_stays_text_to_the_byte(name: str, data: st.DataObject):
    texts = [text for text in texts_of(name) if name != "harmony" or "<|" not in text]
    text = "".join(data.draw(st.lists(st.sampled_from(texts), max_size=12)))
    parts = parts_of(name, text)
    if not any(part.is_call for part in parts):
        assert "".join(part.text for part in parts if part.kind == "text") == text


# Texts that stay text wherever they stand.
PROSE = [
    " ",
    "\n",
    "Yes",
    "x = 1\n",
    "é",
    "{",
    "}",
    '"',
    "<",
    "</tool_call",
    "[TOOL_",
    "```python\n",
]


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"llama3", "harmony"}))
@given(data=st.data())
def test_text_around_calls_is_kept_but_for_white_space_alone(name: str, data: st.DataObject):
    prose = st.lists(st.sampled_from(PROSE), max_size=4).map("".join)
    first, *later = data.draw(st.lists(prose, min_size=2, max_size=4))
    parts = parts_of(name, first + "".join(WRITTEN[name] + text for text in later))
    said = "".join(part.text for part in parts if part.kind == "text")
    assert said == "".join(text for text in (first, *later) if not text.isspace())
    calls = [part for part in parts if part.is_call]
    assert [part.name for part in calls if part.name] == ["city"] * len(later)
    assert "".join(part.text for part in calls) == ARGUMENTS * len(later)


def chunks_of(tokenizer: Tokenizer, deltas: list[Delta]) -> list[dict[str, Any]]:
    """What the chunks of a streamed chat say of its one choice, without the first, the role's."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    request = Chat.parse(chat(**usage), LIMITS)
    generation = Generation("a", request.spec, tokenizer, Coordinators(CoordinatorConfig()), 8.0)
    stream = Answer(request, generation, "a").chunks(deltas).decode()
    events = [json.loads(line[len("data: ") :]) for line in stream.splitlines() if line]
    return [event["choices"][0] for event in events]


@every_format
@pytest.mark.parametrize("size", [1, 3, 10, 1000])
def test_a_chunk_has_one_piece_of_one_call_and_none_is_empty(
    name: str, size: int, tokenizer: Tokenizer, tokens_of: Callable[[str], list[int]]
):
    tokens = tokens_of(f"{WRITTEN[name]}{'; ' if name == 'llama3' else ''}{WRITTEN[name]}")
    events = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    chunks = chunks_of(tokenizer, read_answer(tokenizer, asked(name), events))
    assert all(chunk["delta"] or chunk["finish_reason"] for chunk in chunks)
    assert {len(chunk["delta"].get("tool_calls", "1")) for chunk in chunks} == {1}
    pieces = [piece for chunk in chunks for piece in chunk["delta"].get("tool_calls", ())]
    for index in (0, 1):
        own = [piece["function"] for piece in pieces if piece["index"] == index]
        assert own[0]["name"] == "city"
        assert "".join(function["arguments"] for function in own) == ARGUMENTS
