"""Streamed text equals the whole text, however its tokens are grouped."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.core import token_array
from cluster.errors import RequestError
from cluster.text.completion import TextStream
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls.base import held_len

# The session's tokenizer is immutable, so examples may share it.
relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

texts = st.text(alphabet=st.sampled_from("abé日🙂 \n.the"), max_size=30)


def chunks(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    borders = [0, *cuts, len(ids)]
    return [ids[start:end] for start, end in pairwise(borders)]


def streamed(stream: TextStream, pieces: list[list[int]]) -> tuple[str, str | None]:
    """The whole text, and the stop string that ended it."""
    deltas = [stream.push(token_array(piece)) for piece in pieces]
    deltas.append(stream.finish())
    stops = [delta.stop for delta in deltas if delta.stop is not None]
    assert len(stops) <= 1
    return "".join(delta.text for delta in deltas), stops[0] if stops else None


@relaxed
@given(text=texts, data=st.data())
def test_text_of_valid_utf8_equals_decoding_at_once(
    tokenizer: Tokenizer, text: str, data: st.DataObject
):
    ids = tokenizer.encode(text, add_special_tokens=True).tolist()
    out, stop = streamed(TextStream(tokenizer), chunks(data, ids))
    assert (out, stop) == (tokenizer.decode(ids), None)


@relaxed
@given(data=st.data())
def test_random_byte_level_tokens_equal_decoding_at_once(
    byte_level: Tokenizer, data: st.DataObject
):
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 3), max_size=30))
    for skip in (True, False):
        stream = TextStream(byte_level, skip_special_tokens=skip)
        out, _ = streamed(stream, chunks(data, ids))
        assert out == byte_level.decode(ids, skip_special_tokens=skip)


@relaxed
@given(data=st.data())
def test_text_does_not_depend_on_how_tokens_are_pushed(tokenizer: Tokenizer, data: st.DataObject):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    stops = tuple(data.draw(st.lists(st.sampled_from(["a", "the", "\ufffd", "é "]), max_size=2)))
    one_by_one = TextStream(tokenizer, stops)
    in_chunks = TextStream(tokenizer, stops)
    assert streamed(one_by_one, [[token] for token in ids]) == streamed(
        in_chunks, chunks(data, ids)
    )
    assert one_by_one.num_tokens == in_chunks.num_tokens


@relaxed
@given(
    text=texts.filter(bool),
    stops=st.lists(st.text(alphabet="até日🙂 h", min_size=1, max_size=3), min_size=1, max_size=3),
    include=st.booleans(),
    data=st.data(),
)
def test_stopping_equals_a_search_through_the_whole_text(
    tokenizer: Tokenizer, text: str, stops: list[str], include: bool, data: st.DataObject
):
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    whole = tokenizer.decode(ids)
    stream = TextStream(tokenizer, stops, include_stop=include)
    out, found = streamed(stream, chunks(data, ids))
    # The one that ends first, the longest if several end there.
    ends = [(whole.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole]
    if not ends:
        assert (out, found, stream.num_tokens) == (whole, None, len(ids))
        return
    end, _, stop = min(ends)
    assert found == stop
    assert out == whole[: end if include else end - len(stop)]
    # The token that completed the stop is the first whose text so far contains it.
    count = stream.num_tokens
    assert stop in tokenizer.decode(ids[:count])
    assert stop not in tokenizer.decode(ids[: count - 1])


@given(
    text=st.text(alphabet="ab", max_size=24),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_exactly_the_longest_possible_beginning_is_held_back(text: str, stops: list[str]):
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    assert held_len(text, stops) == max(len(each) for each in beginnings if text.endswith(each))


def test_an_empty_stop_string_is_refused(byte_level: Tokenizer):
    with pytest.raises(RequestError, match="empty"):
        TextStream(byte_level, ["a", ""])


@relaxed
@given(prompt=st.text(alphabet="abt he", max_size=12), text=texts)
def test_a_continued_prompt_keeps_the_space_before_the_text(
    tokenizer: Tokenizer, prompt: str, text: str
):
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).tolist()
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    stream = TextStream(tokenizer, prompt_ids=prompt_ids)
    out, _ = streamed(stream, [[token] for token in ids])
    if prompt_ids and tokenizer.decode(prompt_ids):
        whole = tokenizer.decode(prompt_ids + ids)
        assert out == whole[len(tokenizer.decode(prompt_ids)) :]
    else:
        assert out == tokenizer.decode(ids)


def test_endless_malformed_bytes_are_returned_and_not_held_back(tokenizer: Tokenizer):
    raw = next(
        token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"\xff"
    )
    stream = TextStream(tokenizer)
    out = "".join(stream.push([raw]).text for _ in range(50))
    assert len(out) >= 40
    assert set(out) == {"\ufffd"}


def test_tokens_after_the_stop_are_not_counted(byte_level: Tokenizer):
    ids = byte_level.encode("one. two. three").tolist()
    stream = TextStream(byte_level, (". ",))
    delta = stream.push(ids)
    assert (delta.text, delta.stop) == ("one", ". ")
    assert delta.num_tokens == stream.num_tokens < len(ids)
    assert stream.push(ids).num_tokens == 0
    assert stream.finish().text == ""
    assert stream.is_finished


def test_a_stop_string_within_min_tokens_is_ordinary_text(byte_level: Tokenizer):
    ids = byte_level.encode("a.b.c").tolist()
    position = byte_level.decode(ids[:2])
    stream = TextStream(byte_level, (".",), min_tokens=2)
    delta = stream.push(ids)
    assert delta.text == "a.b"
    assert position == "a."
    assert delta.stop == "."
