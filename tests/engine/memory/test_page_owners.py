"""Pages are never lost, never held twice, and every slot holds the token it should.

Ranks that hold other pages, in whichever kind of layer, are told apart before they compute."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.config.schema import EngineConfig
from cluster.core import TokenTree, token_array
from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.memory.page_owners import PageOwners
from cluster.engine.memory.sequence import Sequence
from cluster.engine.schedule.batch import Pick
from cluster.engine.schedule.scheduler import Schedule
from cluster.engine.types import LayerSpec
from cluster.engine.work import Work
from cluster.spec.token_log import prefix_hash
from tests.support.choices import by_day
from tests.support.engine.driver import some_commit
from tests.support.engine.integrity import check_pages

NUM_PAGES, PAGE_SIZE = 16, 2
NAMES = ("a", "b", "c", "d")
LAYER = LayerSpec(1, 1, torch.float32, torch.device("cpu"))
# Two letters, one of them rare: prefixes of different requests meet all the time.
letters = st.sampled_from((1, 1, 1, 2))


class Residents(RuleBasedStateMachine):
    """Requests come, grow trees, commit, roll back, are preempted and go.

    A slot's key is written as the number of the token it belongs to, so that a lost copy, a page
    shared by mistake or a stale prefix shows up as a wrong number.
    """

    @initialize(
        prefix_cache=st.booleans(),
        window=st.sampled_from((None, 1, 2, 5, 8)),
        mixed=st.booleans(),
        num_windowed_pages=st.sampled_from((7, NUM_PAGES)),
    )
    def start(
        self, prefix_cache: bool, window: int | None, mixed: bool, num_windowed_pages: int
    ) -> None:
        """mixed: with a layer of full attention besides, whose pages are others."""
        layers = [replace(LAYER, window=window), replace(LAYER, window=window and 1)]
        num_pages = [NUM_PAGES]
        if mixed and window is not None:
            layers.insert(1, LAYER)
            num_pages.append(num_windowed_pages)
        self.cache = KVCache(layers, num_pages, PAGE_SIZE)
        self.num_pages = num_pages
        self.window = window
        self.page_owners = PageOwners(self.cache, EngineConfig(prefix_cache=prefix_cache))
        self.tokens: dict[str, list[int]] = {}

    @rule(
        name=st.sampled_from(NAMES),
        back=st.integers(0, 9),
        delta=st.lists(letters, max_size=9),
        parents=st.lists(st.integers(-1, 4), max_size=5),
    )
    def work(self, name: str, back: int, delta: list[int], parents: list[int]) -> None:
        """Roll back, append, evaluate a tree; skipped where the pages do not suffice."""
        known = self.tokens.setdefault(name, [])
        base_len = max(0, len(known) - back)
        tree = _tree(parents)
        work = Work(name, base_len, token_array(delta), tree, 0, prefix_hash(known[:base_len]))
        sequence = self.page_owners.enter(name)
        have_len = self.page_owners.open(work, sequence)
        if have_len is not None:
            assert have_len == sequence.cached_len < base_len < len(known)
            # It goes back into a page that others may share, or to what left the window.
            assert have_len % PAGE_SIZE == 0
            assert base_len - have_len < PAGE_SIZE or (have_len == 0 and self.window is not None)
            self.tokens[name] = known[:have_len]
            return
        context = known[:base_len] + delta
        assert sequence.tokens.tolist() == context[: sequence.cached_len]
        self.tokens[name] = context[: sequence.cached_len]
        left = token_array(context[sequence.cached_len :])
        if len(left) > 1:
            self.page_owners.adopt_prefix(sequence, left)
            assert sequence.cached_len < len(context)
        length = len(context) + len(tree)
        missing = self.page_owners.num_pages_missing(sequence, length)
        self.tokens[name] = context[: sequence.cached_len]
        available = [pool.num_available for pool in self.page_owners.pools]
        if missing > self.page_owners.num_available:
            return
        self.page_owners.reserve(sequence, length)
        left_over = [pool.num_available for pool in self.page_owners.pools]
        assert left_over == [each - missing for each in available]
        self._write(sequence, context, tree)
        self.page_owners.commit(sequence, token_array(context[sequence.cached_len :]))
        sequence.tree = tree
        self.tokens[name] = context

    def _write(self, sequence: Sequence, context: list[int], tree: TokenTree) -> None:
        self.cache.settle()
        start = sequence.cached_len
        values = [*context[start:], *tree.token_ids.tolist()]
        for layer, group in zip(self.cache.layers, self.cache.group_of, strict=True):
            slots = _slots(sequence, group)[start : start + len(values)]
            layer[slots] = torch.tensor(values, dtype=torch.float32).view(-1, 1, 1, 1)

    @precondition(lambda self: any(len(s.tree) for s in self.page_owners.sequences.values()))
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        grown = [s for s in self.page_owners.sequences.values() if len(s.tree)]
        sequence = data.draw(st.sampled_from(grown))
        tree = sequence.tree
        path, keep = some_commit(
            tree,
            lambda _: data.draw(st.booleans()),
            lambda nodes: data.draw(st.sampled_from(nodes)),
        )
        self.page_owners.retain(sequence, path, keep)
        self.tokens[sequence.request_id] += tree.token_ids[path].tolist()
        assert sequence.tree.token_ids.tolist() == tree.token_ids[keep].tolist()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        self.page_owners.leave(name)
        del self.tokens[name]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        self.page_owners.evacuate(self.page_owners.enter(name))
        self.tokens[name] = []

    @invariant()
    def the_books_balance(self) -> None:
        for pool, num_pages in zip(self.page_owners.pools, self.num_pages, strict=True):
            assert pool.num_free + pool.num_idle + pool.num_held == num_pages
        check_pages(self.page_owners)

    @invariant()
    def every_text_is_known(self) -> None:
        for name, tokens in self.tokens.items():
            sequence = self.page_owners.enter(name)
            assert sequence.tokens.tolist() == tokens
            assert sequence.hash_at(len(tokens)) == prefix_hash(tokens)

    @rule()
    def every_slot_holds_its_token(self) -> None:
        """Not after each of the others: moves wait until somebody reads."""
        self.cache.settle()
        for name, tokens in self.tokens.items():
            sequence = self.page_owners.enter(name)
            expected = [*tokens, *sequence.tree.token_ids.tolist()]
            for layer, group in zip(self.cache.layers, self.cache.group_of, strict=True):
                window = self.cache.groups[group].reach.window
                start = 0 if window is None else max(0, len(tokens) - window + 1)
                slots = _slots(sequence, group)[start : len(expected)]
                assert layer[slots, 0, 0, 0].tolist() == expected[start:]

    @invariant()
    def what_left_the_window_is_not_held(self) -> None:
        if self.window is not None:
            for sequence in self.page_owners.sequences.values():
                beyond = sequence.num_pages * PAGE_SIZE - sequence.cached_len
                most = -(-(max(self.window, PAGE_SIZE) + beyond) // PAGE_SIZE) + 2
                assert len(sequence.tables[-1].held_pages) <= most
                if len(sequence.tables) > 1:
                    assert len(sequence.tables[0].held_pages) == sequence.num_pages

    def teardown(self) -> None:
        self.every_slot_holds_its_token()
        for name in NAMES:
            self.page_owners.leave(name)
        assert not any(pool.num_held for pool in self.page_owners.pools)
        self.page_owners.forget_prefixes()
        assert [pool.num_free for pool in self.page_owners.pools] == self.num_pages
        assert not self.page_owners._prefixes._entries


def _slots(sequence: Sequence, group: int) -> torch.Tensor:
    return torch.from_numpy(sequence.tables[group].slots.copy())


def _tree(parents: list[int]) -> TokenTree:
    """A tree whose nodes have numbers no context token has."""
    valid = [min(parent, node - 1) for node, parent in enumerate(parents)]
    return TokenTree.of(range(100, 100 + len(parents)), valid)


TestResidents = Residents.TestCase
TestResidents.settings = settings(
    max_examples=by_day(40, 400), stateful_step_count=30, derandomize=True, database=None
)


def write(page_owners: PageOwners, name: str, tokens: Iterable[int]) -> Sequence:
    """One token after the other."""
    sequence = page_owners.enter(name)
    for token in tokens:
        page_owners.reserve(sequence, sequence.cached_len + 1)
        page_owners.commit(sequence, token_array([token]))
        check_pages(page_owners)
    return sequence


def test_the_least_recently_used_page_goes_first_and_children_before_parents():
    cache = KVCache([LAYER], [4], 1)
    page_owners = PageOwners(cache, EngineConfig())
    for name, tokens in (("old", [1, 2]), ("new", [3, 4])):
        write(page_owners, name, tokens)
        page_owners.leave(name)
    taken = page_owners.enter("taker")
    page_owners.reserve(taken, 1)
    probe = page_owners.enter("probe")
    assert page_owners.adopt_prefix(probe, token_array([1, 2, 9])) == 1
    page_owners.leave("probe")
    probe = page_owners.enter("probe")
    assert page_owners.adopt_prefix(probe, token_array([3, 4, 9])) == 2


def test_an_entry_gets_its_page_back_from_who_computes_it_again():
    page_owners = PageOwners(KVCache([replace(LAYER, window=2)], [4], 1), EngineConfig())
    for name in ("first", "second"):
        write(page_owners, name, range(8))
        page_owners.leave(name)
    assert page_owners.pools[0].num_idle == 4


def _told(*, taken: int | None = None, num_pages: tuple[int, int] = (16, 16)) -> str:
    """Of one rank's step.  taken: the group whose first page somebody else holds there."""
    layers = [LAYER, replace(LAYER, window=8)]
    page_owners = PageOwners(
        KVCache(layers, num_pages, PAGE_SIZE), EngineConfig(prefix_cache=False)
    )
    if taken is not None:
        page_owners.pools[taken].allocate()
    sequence = page_owners.enter("a")
    page_owners.reserve(sequence, 6)
    if taken is not None:
        # The pools count alike again: the step's slots alone differ.
        page_owners.pools[taken].drop(0)
    pick = Pick(sequence, Work("a", 0, token_array(range(6))), 6, completes=True)
    return repr(Schedule([pick], num_rows=6).told(page_owners.pools))


@pytest.mark.parametrize(
    "other",
    [{"taken": 0}, {"taken": 1}, {"num_pages": (15, 16)}, {"num_pages": (16, 15)}],
    ids=str,
)
def test_other_slots_or_another_number_of_free_pages_of_either_kind_are_another_step(
    other: dict[str, object],
):
    assert _told(**other) != _told() == _told()
