from __future__ import annotations

import numpy as np

from cluster.core import Commit, token_array
from cluster.draft.committed_text import RequestState, RequestTable, common_len
from cluster.spec.token_log import TokenLog
from tests.support.draft.author import GREEDY, Author


def text_of(token_ids: list[int]) -> TokenLog:
    text = TokenLog()
    text.append(token_array(token_ids))
    return text


def table(max_requests: int = 2) -> RequestTable[RequestState]:
    return RequestTable(max_requests, RequestState.opened_by)


def apply(requests: RequestTable[RequestState], commit: Commit) -> int:
    state = requests.admit(commit)
    if state is None:
        return requests.declined(commit).have_len
    kept = common_len(state.text, commit)
    state.text.truncate(kept)
    state.text.append(commit.token_ids[kept - commit.base_len :])
    return len(state.text)


def test_a_commit_ahead_of_the_text_is_answered_with_the_known_length() -> None:
    requests, author = table(), Author([1, 2, 3])
    assert apply(requests, author.opening()) == 3
    author.commit([4, 5])
    author.commit([6])
    assert apply(requests, author.commit_of(5)) == 3
    assert apply(requests, author.commit_of(3)) == 6


def test_an_unknown_request_is_requested_from_the_start() -> None:
    author = Author([1, 2, 3])
    author.opening()
    assert apply(table(), author.commit_of(2)) == 0


def test_another_text_with_the_same_id_is_requested_from_the_start() -> None:
    requests, author, other = table(), Author([1, 2, 3]), Author([9, 2, 3, 4])
    apply(requests, author.opening())
    other.opening()
    assert apply(requests, other.commit_of(2)) == 0
    assert apply(requests, other.commit_of(0)) == 4
    assert [state.text.token_ids.tolist() for state in requests] == [[9, 2, 3, 4]]


def test_a_stale_generation_changes_nothing_and_a_newer_one_takes_over() -> None:
    requests, author = table(), Author([1, 2, 3])
    author.generation = 5
    apply(requests, author.opening())
    author.generation = 4
    author.tokens = [1]
    stale = author.commit_of(1)
    assert requests.admit(stale) is None
    assert requests.declined(stale).generation == 5
    author.generation = 6
    author.tokens = [1, 2, 8]
    assert apply(requests, author.commit_of(1)) == 3
    assert requests.get("a", 5) is None
    state = requests.get("a", 6)
    assert state.text.token_ids.tolist() == [1, 2, 8]


def test_a_later_commit_without_parameters_keeps_the_task() -> None:
    requests, author = table(), Author([1, 2, 3], task="code")
    apply(requests, author.opening())
    later = author.commit([4])
    apply(requests, Commit(later.request_id, 1, 3, later.prefix_hash, later.token_ids, 3, 16))
    state = requests.find("a")
    assert (state.task, state.params) == ("code", GREEDY)


def test_a_full_table_declines_new_requests_and_keeps_the_old() -> None:
    requests = table(max_requests=1)
    first, second = Author([1], request_id="a"), Author([1], request_id="b")
    assert apply(requests, first.opening()) == 1
    assert apply(requests, second.opening()) == 0
    assert apply(requests, first.commit([2])) == 2
    requests.pop("a")
    assert apply(requests, second.commit_of(0)) == 1


def test_common_len_is_the_first_difference_of_the_texts() -> None:
    text, author = text_of([1, 2, 3, 4]), Author([1, 2, 7])
    author.opening()
    assert common_len(text, author.commit_of(0)) == 2
    assert common_len(text, author.commit_of(1)) == 2
    assert common_len(text_of([1]), author.commit_of(1)) == 1
    assert np.array_equal(text.token_ids, [1, 2, 3, 4])
