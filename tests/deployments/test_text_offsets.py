"""`text_offset` of completions: places in the text that is sent, whatever its tokens are."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import EMPTY_TOKENS, TokenLogprob
from cluster.text.completion import TextOffsets
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.api.writer import LogprobWriter
from tests.support.deployments.server import Server
from tests.support.text.tokenizers_for_tests import (
    byte_fallback_folder,
    byte_level_folder,
    small_tokenizer,
)


@pytest.fixture(scope="module", params=[byte_level_folder, byte_fallback_folder])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return small_tokenizer(request.param)


def of(tokenizer: Tokenizer, *, skips: bool = True) -> TextOffsets:
    return TextOffsets(tokenizer, EMPTY_TOKENS, skip_special_tokens=skips)


@given(text=st.text("ab 日é\n😀", max_size=12))
def test_every_token_stands_where_its_characters_do(tokenizer: Tokenizer, text: str):
    token_ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    shown = tokenizer.decode(token_ids)
    found = of(tokenizer).of_output(token_ids)
    assert found == sorted(found)
    assert all(place <= len(shown) for place in found)
    pieces = of(tokenizer)
    assert [place for token in token_ids for place in pieces.of_output([token])] == found
    # A prompt's tokens stand in its echo as the same tokens do in an output.
    echoed = of(tokenizer)
    assert echoed.of_prompt(token_ids, shown) == found
    assert echoed.of_output(token_ids[:1]) == [len(shown)] * len(token_ids[:1])


def test_special_tokens_have_width_where_they_are_shown(tokenizer: Tokenizer):
    special = min(tokenizer.special_ids)
    (letter,) = tokenizer.encode("a", add_special_tokens=False).tolist()[-1:]
    width = len(tokenizer.token_text(special))
    assert of(tokenizer).of_output([special, letter]) == [0, 0]
    assert of(tokenizer, skips=False).of_output([special, letter]) == [0, width]
    # One that the tokenizer has put before a text is not in it; one in the text is.
    echo = tokenizer.token_text(special) + "a"
    assert of(tokenizer).of_prompt([special, letter], echo) == [0, width]
    assert of(tokenizer).of_prompt([special, letter], "a") == [0, 0]


def answers(server: Server, **body: Any) -> list[dict[str, Any]]:
    """The choice of the whole answer, and that of the stream with its pieces joined."""
    asked = {"temperature": 0, "max_tokens": 9, "logprobs": 0, **body}
    joined = {"text": "", "logprobs": {"tokens": [], "text_offset": []}}
    for chunk in server.stream("/v1/completions", **asked):
        for choice in chunk["choices"]:
            joined["text"] += choice["text"]
            for name, values in joined["logprobs"].items():
                values += choice["logprobs"][name]
    return [server.complete(**asked), joined]


@pytest.mark.parametrize("is_speculating", [False, True])
def test_a_character_of_several_tokens_has_one_place(server: Server, is_speculating: bool):
    for choice in answers(
        server,
        prompt="x",
        structured_outputs={"choice": ["日a"]},
        speculation={"enabled": is_speculating},
    ):
        assert choice["text"] == "日a"
        *parts, letter = choice["logprobs"]["text_offset"]
        assert (set(parts), letter) == ({0}, 1)


@pytest.mark.parametrize("kept", [1, 3, 100, -1])
def test_the_echo_is_that_of_the_tokens_that_were_used(server: Server, kept: int):
    prompt = "one two 日 four <|end|> six"
    token_ids = server.ingress.tokenizer.encode(prompt).tolist()
    for choice in answers(
        server,
        prompt=prompt,
        truncate_prompt_tokens=kept,
        echo=True,
        max_tokens=2,
    ):
        count = min(kept, len(token_ids)) if kept > 0 else len(token_ids)
        tokens = choice["logprobs"]["tokens"][:count]
        offsets = choice["logprobs"]["text_offset"]
        echo = choice["text"][: offsets[count]]
        assert prompt.endswith(echo)
        assert len(echo) < len(prompt) if count < len(token_ids) else echo == prompt
        for token, place in zip(tokens, offsets, strict=False):
            assert token.startswith("bytes:") or echo.startswith(token, place)


def test_an_echo_of_token_ids_leaves_out_special_tokens_and_their_width(server: Server):
    token_ids = server.ingress.tokenizer.encode("a<|end|>b").tolist()
    for choice in answers(server, prompt=token_ids, echo=True, max_tokens=1):
        assert choice["text"].startswith("ab")
        *_, last, output = choice["logprobs"]["text_offset"]
        assert (last, output) == (1, 2)


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_the_drawn_token_is_among_the_top_ones_however_unlikely(tokenizer: Tokenizer, num_top: int):
    likely, second, drawn = (tokenizer.encode(each).tolist()[-1] for each in "abc")
    top = ((likely, -0.1), (second, -2.5))[:num_top]
    logprobs = [TokenLogprob(-7.0, top), TokenLogprob(-0.1, top)]
    written = LogprobWriter(tokenizer).completion([drawn, likely], logprobs, [0, 1])
    unlikely, ordinary = written["top_logprobs"]
    assert set(unlikely) == {*"ab"[:num_top], "c"}
    assert unlikely["c"] == written["token_logprobs"][0] == -7.0
    assert len(ordinary) == max(num_top, 1)
    assert ordinary["a"] == -0.1
