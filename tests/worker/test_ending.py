"""Where a text ends: it says it alone, whatever a step has drawn at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import FinishReason, SamplingParams, token_array
from cluster.worker.texts import TargetText
from tests.support.worker.texts import opened

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def cut(
    tokens: list[int], num_output: int, remaining: int, stop_ids: tuple[int, ...], min_tokens: int
) -> tuple[int, FinishReason | None]:
    """What a text of so many output tokens, which may have so many more, keeps of a step's."""
    params = SamplingParams(
        stop_token_ids=stop_ids, min_tokens=min_tokens, max_tokens=num_output + remaining
    )
    written = opened("r", params=params, written=[0] * num_output)
    return TargetText("r", written).ending(token_array(tokens))


@pytest.mark.parametrize(
    ("tokens", "num_output", "remaining", "stop_ids", "min_tokens", "expected"),
    [
        ([5, 6], 0, 9, (), 0, (2, None)),
        ([5, 6], 0, 2, (), 0, (2, LENGTH)),
        ([5, 6, 7], 0, 2, (), 0, (2, LENGTH)),
        ([5, 2, 7], 0, 9, (2,), 0, (1, STOP)),
        ([2], 0, 9, (2,), 0, (0, STOP)),
        ([5, 3, 2], 0, 9, (2, 3), 0, (1, STOP)),
        # An end token that may not stand yet is a token like any other.
        ([2, 5, 2], 0, 9, (2,), 1, (2, STOP)),
        ([2, 2, 2], 3, 9, (2,), 5, (2, STOP)),
        ([2, 2], 0, 9, (2,), 2, (2, None)),
        # The limit comes first: an end token behind it was never part of the text.
        ([5, 2], 0, 1, (2,), 0, (1, LENGTH)),
        ([5, 2], 0, 2, (2,), 0, (1, STOP)),
    ],
)
def test_a_step_is_cut_where_the_text_ends(
    tokens: list[int],
    num_output: int,
    remaining: int,
    stop_ids: tuple[int, ...],
    min_tokens: int,
    expected: tuple[int, FinishReason | None],
) -> None:
    assert cut(tokens, num_output, remaining, stop_ids, min_tokens) == expected


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=30),
    st.sets(st.integers(0, 4), max_size=2),
    st.integers(0, 10),
    st.integers(1, 30),
    st.data(),
)
def test_how_many_tokens_a_step_brings_changes_no_end(
    drawn: list[int], stop_ids: set[int], min_tokens: int, max_tokens: int, data: st.DataObject
) -> None:
    def ended(sizes: list[int]) -> tuple[list[int], FinishReason | None]:
        text: list[int] = []
        rest = drawn
        for size in sizes:
            part, rest = rest[:size], rest[size:]
            if not part:
                break
            room = max_tokens - len(text)
            kept, reason = cut(part, len(text), room, tuple(stop_ids), min_tokens)
            text += part[:kept]
            if reason is not None:
                return text, reason
        return text, None

    sizes = data.draw(st.lists(st.integers(1, 8), min_size=len(drawn), max_size=len(drawn)))
    assert ended(sizes) == ended([1] * len(drawn))
