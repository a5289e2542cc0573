from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cluster.core import Commit
from cluster.draft.base import DrafterContext
from cluster.draft.ngram_cache import GramStore, NgramCacheDrafter, NgramCacheOptions
from cluster.draft.replay import Recording, replay
from cluster.errors import ConfigError
from tests.support.draft.author import GREEDY, Author, write


def drafter(max_nodes: int = 16, **options: object) -> NgramCacheDrafter:
    context = DrafterContext("ngram", max_nodes, 8)
    return NgramCacheDrafter(context, NgramCacheOptions(**options))  # type: ignore[arg-type]


def test_text_of_an_ended_request_helps_the_next_one() -> None:
    cache, text = drafter(max_nodes=4), list(range(10, 40))
    write(cache, Author(text, request_id="old"), [])
    cache.release(["old"])
    proposal = write(cache, Author([99, 12, 13, 14, 15], request_id="new"), [])
    assert proposal is not None
    assert proposal.tree.token_ids.tolist() == [16, 17, 18, 19]


def test_task_classes_do_not_share_their_text() -> None:
    cache = drafter()
    write(cache, Author([1, 2, 3, 4, 5], request_id="old", task="code"), [])
    assert write(cache, Author([2, 3], request_id="new", task="prose"), []) is None
    assert write(cache, Author([2, 3], request_id="newer", task="code"), []) is not None


def test_the_most_frequent_continuation_comes_first() -> None:
    cache = drafter()
    for index, following in enumerate([50, 60, 60]):
        write(cache, Author([1, 2, following], request_id=str(index)), [])
    proposal = write(cache, Author([1, 2], request_id="new"), [])
    assert proposal is not None
    assert proposal.tree.token_ids[0] == 60
    assert 50 in proposal.tree.token_ids.tolist()


def test_other_tenants_do_not_see_what_was_counted() -> None:
    cache = drafter()
    write(cache, Author([1, 2, 50, 51, 52], tenant=b"a"), [])
    for tenant in (b"", b"b"):
        assert write(cache, Author([1, 2], request_id=f"of {tenant!r}", tenant=tenant), []) is None
    assert write(cache, Author([1, 2], request_id="own", tenant=b"a"), []) is not None


def test_repeated_outputs_are_drafted_almost_whole() -> None:
    text = np.random.default_rng(0).integers(0, 500, 200).astype(np.int32)
    for temperature in (0.0, 1.0):
        cache = drafter()
        params = dataclasses.replace(GREEDY, temperature=temperature)
        first = replay(cache, Recording(text[:20], text[20:], params), 16)
        second = replay(cache, Recording(text[:20], text[20:], params), 16)
        assert first.mean_acceptance_length < 2.0
        assert second.mean_acceptance_length > 5.0


def test_memory_is_bounded_whatever_is_committed() -> None:
    cache = drafter(max_contexts=1000, max_stores=2)
    generator = np.random.default_rng(1)
    for index in range(12):
        text = generator.integers(0, 50_000, 700).tolist()
        write(
            cache,
            Author(
                text, request_id=str(index), task=f"task-{index % 3}", tenant=b"%d" % (index % 2)
            ),
            [],
        )
        cache.release([str(index)])
        assert cache.num_contexts <= 2 * 1000


def test_a_store_forgets_the_least_recently_used_half_first() -> None:
    store = GramStore(max_contexts=8, max_continuations=2)
    for key in range(4):
        store.add(key, 1)
    assert store.counts(0) == [1, 1]
    for key in range(100, 104):
        store.add(key, 1)
        assert store.counts(0) is not None, "what is used stays"
    assert len(store) <= 8
    store.add(104, 1)
    assert store.counts(1) is None


def test_a_full_context_replaces_its_rarest_continuation() -> None:
    store = GramStore(max_contexts=8, max_continuations=2)
    for token in (1, 1, 1, 2, 3):
        store.add(0, token)
    assert store.counts(0) == [1, 3, 3, 2]


def test_a_rollback_does_not_count_the_text_twice() -> None:
    cache, author = drafter(), Author([1, 2, 3, 4])
    cache.observe([author.opening()])
    before = dict(cache._stores.of((b"", "default"))._young)
    counts = {key: list(value) for key, value in before.items()}
    shorter = author.commit_of(0)
    cache.observe([dataclasses.replace(shorter, token_ids=shorter.token_ids[:2])])
    cache.observe([shorter])
    assert cache._stores.of((b"", "default"))._young == counts


def test_a_repeated_commit_is_cheap_and_changes_nothing() -> None:
    cache, author = drafter(), Author([1, 2, 1, 2])
    first = write(cache, author, [])
    assert first is not None
    commit: Commit = author.commit_of(0)
    (observation,) = cache.observe([commit])
    assert observation.have_len == 4
    assert cache.propose([author.task()]) == [], "the tree stands as it was proposed"


@pytest.mark.parametrize(
    "options",
    [{"min_ngram": 0}, {"max_contexts": 1}, {"max_stores": 0}, {"max_continuations": 0}],
)
def test_meaningless_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        NgramCacheOptions(**options)
