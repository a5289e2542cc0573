"""The prefix hash, and the log that keeps it for every prefix of a text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import token_array
from cluster.spec.token_log import TokenLog, prefix_hash, prefix_hashes

# Other languages implement poly64 from the wire contract; these vectors are what they test against.
PREFIX_HASH_VECTORS = [
    ([], 0x0000000000000000),
    ([0], 0x0000000000000001),
    ([1, 2, 3], 0x992EC7721A7027B5),
    ([4095, 0, 17], 0xE109A69E04E60C27),
    ([2**31 - 1], 0x0000000080000000),
    (list(range(1000)), 0x7D2152B65922DE44),
]


@pytest.mark.parametrize(("token_ids", "expected"), PREFIX_HASH_VECTORS)
def test_prefix_hash_gives_the_committed_vectors(token_ids: list[int], expected: int):
    assert prefix_hash(token_ids) == expected
    assert prefix_hash(token_array(token_ids)) == expected


@given(*2 * [st.lists(st.integers(-(2**31), 2**31 - 1), max_size=60)])
def test_the_hash_of_every_prefix_equals_the_recurrence(before: list[int], token_ids: list[int]):
    assert prefix_hashes(token_array(token_ids), prefix_hash(before)).tolist() == [
        prefix_hash(before + token_ids[: i + 1]) for i in range(len(token_ids))
    ]


def check(log: TokenLog, held: list[int]) -> None:
    assert len(log) == len(held)
    assert log.token_ids.tolist() == log.since(0).tolist() == held
    hashes = [prefix_hash(held[:n]) for n in range(len(held) + 1)]
    assert [log.hash_at(n) for n in range(len(held) + 1)] == hashes


# A number cuts the log there, a list is appended; both sides of the border between the hash's loop
# and its vectorised form occur.
edits = st.lists(st.integers(0, 120) | st.lists(st.integers(0, 2**31 - 1), max_size=60))


@given(st.lists(st.integers(0, 9), max_size=60), edits)
def test_a_log_holds_what_was_appended_and_not_cut_off_with_its_hashes(
    first: list[int], edits: list[int | list[int]]
):
    log, held = TokenLog(token_array(first)), list(first)
    check(log, held)
    for edit in edits:
        if isinstance(edit, int):
            log.truncate(edit)
            held = held[:edit]
        else:
            log.append(token_array(edit))
            held += edit
        check(log, held)


@given(st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=40), max_size=12))
def test_views_do_not_change_when_tokens_are_appended(pieces: list[list[int]]):
    # They may still be on their way in frames.
    log, held, views = TokenLog(), [], []
    for piece in pieces:
        views.append((log.since(0), list(held)))
        log.append(token_array(piece))
        held += piece
    for token_ids, then in views:
        assert token_ids.tolist() == then


def test_parts_of_a_log_are_ranges_of_its_tokens():
    log = TokenLog(token_array([5, 6, 7, 8]))
    assert log.since(1).tolist() == [6, 7, 8]
    assert log.since(1, 3).tolist() == [6, 7]
    assert log.since(3, 9).tolist() == [8]
    assert log.ends_with(token_array([7, 8]), 2)
    assert not log.ends_with(token_array([7, 8]), 1)
    assert not log.ends_with(token_array([7, 9]), 2)
    assert not log.ends_with(token_array([7]), 2)
