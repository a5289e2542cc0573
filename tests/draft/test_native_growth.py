"""Native growth gives the same trees as engine steps and Python."""

import dataclasses
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from cluster.core import SamplingParams
from cluster.draft.lm import LMDrafter
from cluster.draft.lm_request import LMRequest
from cluster.engine.engine import Engine
from tests.support.checkpoints import noisy_copy
from tests.support.choices import pairwise
from tests.support.draft.author import (
    GREEDY,
    PROMPT,
    Author,
    draft_engine,
    grow,
    lm_drafter,
    target_text,
    write,
)
from tests.support.engine.integrity import check_integrity
from tests.support.engine.native import needs_native

pytestmark = needs_native

# Tiny models whose heads native attention takes: plain, and with a window.
MODELS = ("qwen3", "mistral-sliding")
LAWS = {
    "greedy": GREEDY,
    "temperature 0.8": dataclasses.replace(GREEDY, temperature=0.8, seed=11, stream=2),
    "truncated": dataclasses.replace(
        GREEDY, temperature=1.0, seed=2**63 + 3, top_k=12, top_p=0.9, min_p=0.02
    ),
    "short": dataclasses.replace(GREEDY, temperature=0.7, seed=5, max_tokens=9),
    "stopping": dataclasses.replace(
        GREEDY, temperature=0.9, seed=6, min_tokens=6, stop_token_ids=tuple(range(4, 100))
    ),
}


@pytest.fixture(scope="module")
def folders(
    checkpoint_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """Folders of each model: a target, and a drafter that often agrees with it."""
    targets = {name: checkpoint_factory(name) for name in MODELS}
    return {
        name: (folder, noisy_copy(folder, tmp_path_factory.mktemp("noisy") / name))
        for name, folder in targets.items()
    }


@pytest.fixture
def drafting(folders: dict[str, tuple[Path, Path]]) -> Path:
    return folders[MODELS[0]][1]


def python_drafter(engine: Engine, **options: int | float) -> LMDrafter:
    return lm_drafter(engine, max_nodes=48, natively=False, **options)


def native_drafter(engine: Engine, **options: int | float) -> LMDrafter:
    drafter = lm_drafter(engine, max_nodes=48, **options)
    assert drafter._rules is not None
    return drafter


def unbounded(drafter: LMDrafter) -> LMDrafter:
    """Slices without a time limit."""
    drafter._slice_s = 1e9
    return drafter


def request_of(drafter: LMDrafter, name: str = "a") -> LMRequest:
    return drafter._requests.find(name)


def assert_same_state(left: LMRequest, right: LMRequest) -> None:
    assert (left.cached_len, left.root_len) == (right.cached_len, right.root_len)
    mine, theirs = left.tree, right.tree
    for one, other in zip(mine.nodes[1:], theirs.nodes[1:], strict=True):
        for name in ("token", "depth", "slot", "parent.index"):
            assert attrgetter(name)(one) == attrgetter(name)(other)
        assert one.survival == pytest.approx(other.survival, rel=1e-4)
    assert [node for _, node in sorted(mine._frontier)] == [
        node for _, node in sorted(theirs._frontier)
    ]
    pairs = zip((mine.root, *mine.expanded), (theirs.root, *theirs.expanded), strict=True)
    for one, other in ((mine.ranking, theirs.ranking) for mine, theirs in pairs):
        assert one.token_ids[:4].tolist() == other.token_ids[:4].tolist()
        np.testing.assert_allclose(one.scores[:4], other.scores[:4], rtol=1e-4)


def follow(drafters: Sequence[LMDrafter], author: Author, token_ids: Sequence[int]) -> None:
    commit = author.commit(token_ids)
    for drafter in drafters:
        drafter.observe([commit])
        grow(drafter, author)


@pairwise(name=LAWS, model=MODELS, is_resident=[False, True])
def test_native_growth_gives_the_same_tree_as_engine_steps(
    folders: dict[str, tuple[Path, Path]], name: str, model: str, is_resident: bool
):
    params, (target, drafting) = LAWS[name], folders[model]
    text = target_text(draft_engine(target), PROMPT, params, 24).tolist()
    ours = native_drafter(draft_engine(drafting))
    theirs = python_drafter(draft_engine(drafting))
    ours._is_resident = theirs._is_resident = is_resident
    author = Author(PROMPT, params, max_nodes=12)
    follow((ours, theirs), author, PROMPT)
    position = 0
    while position < min(len(text), params.max_tokens - 3):
        step = 1 + position % 3
        follow((ours, theirs), author, text[position : position + step])
        position += step
        assert_same_state(request_of(ours), request_of(theirs))
    for drafter in (ours, theirs):
        check_integrity(drafter.engine)


def test_requests_share_passes_by_the_survival_of_their_leaves(drafting: Path):
    authors = [
        Author(PROMPT[index : index + 5], LAWS[name], name, max_nodes=10)
        for index, name in enumerate(("greedy", "temperature 0.8", "truncated"))
    ]
    drafters = (
        unbounded(native_drafter(draft_engine(drafting), max_rows=5)),
        python_drafter(draft_engine(drafting), max_rows=5),
    )
    commits = [author.opening() for author in authors]
    for drafter in drafters:
        drafter.observe(commits)
        grow(drafter, *authors)
    ours, theirs = drafters
    for author in authors:
        assert_same_state(
            request_of(ours, author.request_id), request_of(theirs, author.request_id)
        )


def test_one_slice_grows_the_tree_and_an_interruption_ends_it_after_a_pass(
    drafting: Path,
):
    drafter = unbounded(native_drafter(draft_engine(drafting), width=3, min_survival=1e-6))
    author = Author(PROMPT[:8], max_nodes=12)
    drafter.observe([author.opening()])
    drafter.interrupt()
    drafter.propose([author.task()])
    assert len(request_of(drafter).tree.expanded) == 0  # the text was read
    drafter.interrupt()
    drafter.propose([author.task()])
    assert len(request_of(drafter).tree.expanded) == 3
    (proposal,) = drafter.propose([author.task()])
    assert len(request_of(drafter).tree.expanded) == 24
    assert len(proposal.tree) == 12
    assert not drafter.propose([author.task()])


def test_unsupported_requests_grow_in_python_beside_native_ones(drafting: Path):
    biased = dataclasses.replace(GREEDY, logit_bias=((17, 4.0),))
    authors = [
        Author(PROMPT, GREEDY, "plain", max_nodes=8),
        Author(PROMPT, biased, "biased", max_nodes=8),
    ]
    both, alone = (native_drafter(draft_engine(drafting)) for _ in range(2))
    commits = [author.opening() for author in authors]
    both.observe(commits)
    together = grow(both, *authors)
    for author, commit in zip(authors, commits, strict=True):
        alone.observe([commit])
        (expected,) = grow(alone, author).values()
        assert together[author.request_id].tree.token_ids.tolist() == (
            expected.tree.token_ids.tolist()
        )


def test_a_drafter_that_lost_its_cache_prefills_again(drafting: Path):
    engine = draft_engine(drafting)
    drafter = native_drafter(engine)
    author = Author(PROMPT, LAWS["temperature 0.8"], max_nodes=8)
    expected = write(drafter, author, [])
    engine.release("a")
    proposal = write(drafter, author, expected.tree.token_ids[:1].tolist())
    assert (proposal.base_len, len(proposal.tree)) == (len(author.tokens), 8)
    check_integrity(engine)


def test_a_tree_without_free_pages_waits(drafting: Path):
    # 12 pages of 8: two requests of 3 pages each leave room for one tree of 48 nodes at most.
    drafter = native_drafter(draft_engine(drafting, num_pages=12), min_survival=1e-9)
    authors = [Author(PROMPT, GREEDY, name, max_nodes=32) for name in ("a", "b")]
    drafter.observe([author.opening() for author in authors])
    proposals = grow(drafter, *authors)
    assert max(len(proposal.tree) for proposal in proposals.values()) == 32
    assert drafter.pages_in_use <= 12
    check_integrity(drafter.engine)
    drafter.release(["a", "b"])
    assert drafter.pages_in_use == 0


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=1.0, seed=3, max_tokens=1000)]
)
def test_a_context_at_its_limit_has_no_children_beyond(drafting: Path, params: SamplingParams):
    prompt = [*PROMPT, *PROMPT[:9]]
    drafters = [
        made(draft_engine(drafting, max_context_len=32), min_survival=1e-6)
        for made in (native_drafter, python_drafter)
    ]
    follow(drafters, Author(prompt, params, max_nodes=12), prompt)
    assert_same_state(*(request_of(drafter) for drafter in drafters))
    assert max(node.depth for node in request_of(drafters[0]).tree.nodes) <= 3


def test_a_resident_expands_no_leaf_whose_children_nobody_would_see(drafting: Path):
    pooled, resident = (native_drafter(draft_engine(drafting), min_survival=1e-9) for _ in range(2))
    resident._is_resident = True
    trees = []
    for drafter in (pooled, resident):
        write(unbounded(drafter), Author(PROMPT[:8], max_nodes=6), [])
        trees.append(request_of(drafter).tree)
    in_pool, inside = trees
    assert len(inside.expanded) < 6 < len(in_pool.expanded)
    assert inside.best_leaf_survival() < inside.least_worth(6)
    expected = sum(in_pool.best_survivals(6))
    assert sum(inside.best_survivals(6)) == pytest.approx(expected, rel=0.02)
