"""Drafts from the request's own text and from past outputs."""

from typing import Any

import numpy as np
import pytest

from cluster.core import EMPTY_TREE, SamplingParams
from cluster.draft.base import DrafterContext
from cluster.draft.suffix import PromptLookupOptions, SuffixDrafter, SuffixOptions
from cluster.errors import ConfigError
from tests.support.draft.author import GREEDY, Author, grow, write

CIRCLE = (b"", "default")  # of most authors


def drafter(max_nodes: int = 16, **options: object) -> SuffixDrafter:
    context = DrafterContext("suffix", max_nodes, 8)
    return SuffixDrafter(context, SuffixOptions(**options))  # type: ignore[arg-type]


def text_of(seed: int, length: int = 300) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 500, length).astype(np.int32)


def finish(suffix: SuffixDrafter, author: Author, output: list[int]) -> None:
    write(suffix, author, [])
    write(suffix, author, output)
    suffix.release([author.request_id])


@pytest.mark.parametrize(
    ("prompt", "drafts"), [([1, 2, 52, 53], [54, 55, 56]), ([7, 8, 9], [50, 51, 52, 53])]
)
def test_a_past_output_is_drafted_again_behind_its_prompt_too(prompt: list[int], drafts: list[int]):
    suffix = drafter(max_nodes=4)
    finish(suffix, Author([7, 8, 9]), [50, 51, 52, 53, 54, 55, 56])
    proposal = write(suffix, Author(prompt, request_id="next"), [])
    assert proposal.tree.token_ids.tolist() == drafts
    assert proposal.tree.parents.tolist() == list(range(-1, len(drafts) - 1))


@pytest.mark.parametrize("change", [{"task": "prose"}, {"tenant": b""}, {"tenant": b"b"}])
def test_other_tasks_and_tenants_do_not_see_an_output_and_a_prompt_is_not_one(change: Any):
    suffix, own = drafter(min_ngram=2), {"task": "code", "tenant": b"a"}
    finish(suffix, Author([7, 8, 9, *range(100, 150), 3], **own), [50, 51, 52, 53, 54])
    other = Author([1, 51, 52], request_id="other", **{**own, **change})
    assert write(suffix, other, []) is None
    assert write(suffix, Author([1, 7, 8], request_id="prompt", **own), []) is None
    assert write(suffix, Author([1, 51, 52], request_id="own", **own), []) is not None


def test_what_is_kept_is_bounded_over_tenants():
    suffix = drafter(max_tokens=100, max_stores=3)
    for number in range(20):
        author = Author([7, 8], request_id=f"r{number}", tenant=b"%d" % number)
        finish(suffix, author, text_of(number, 40).tolist())
    for number, is_known in ((19, True), (17, True), (16, False)):
        text = text_of(number, 40)[:10].tolist()
        author = Author(text, request_id=f"next {number}", tenant=b"%d" % number)
        assert (write(suffix, author, []) is not None) == is_known


def test_an_end_of_the_text_that_is_never_looked_up_is_refused():
    with pytest.raises(ConfigError, match="min_ngram: 9 exceeds max_ngram, 8"):
        SuffixOptions(min_ngram=9)


def lookup(max_nodes: int = 16) -> SuffixDrafter:
    context = DrafterContext("lookup", max_nodes, 8)
    return SuffixDrafter(context, PromptLookupOptions(min_ngram=2))


def test_prompt_lookup_keeps_no_outputs():
    looking = lookup()
    finish(looking, Author([7, 8, 9]), [50, 51, 52])
    assert len(looking._outputs(CIRCLE)) == 0
    assert write(looking, Author([7, 8, 9], request_id="next"), []) is None
    assert write(looking, Author([7, 8, 9, 7, 8], request_id="own"), []) is not None


ENDING = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "max_nodes", "params", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 2, 3], 4, GREEDY, [4, 5, 6, 7]),  # behind the latest occurrence
        ([1, 2, 3, 4, 5], 16, GREEDY, []),
        ([4, 5, 6] * 4, 9, GREEDY, [4, 5, 6] * 3),  # beyond the end of the text
        (ENDING, 16, SamplingParams(temperature=0.0, max_tokens=4), [3, 4, 5]),
        (ENDING, 16, SamplingParams(temperature=0.0, stop_token_ids=(5,)), [3, 4]),
    ],
)
def test_the_text_goes_on_as_before_as_far_as_it_may(
    prompt: list[int], max_nodes: int, params: SamplingParams, drafts: list[int]
):
    proposal = write(lookup(max_nodes), Author(prompt, params), [])
    tree = EMPTY_TREE if proposal is None else proposal.tree
    assert tree.token_ids.tolist() == drafts
    assert tree.parents.tolist() == list(range(-1, len(drafts) - 1))


def test_a_tree_is_proposed_once_and_again_after_a_commit():
    looking, author = lookup(), Author([1, 2, 3, 4, 1, 2])
    assert write(looking, author, []) is not None
    assert grow(looking, author) == {}
    proposal = write(looking, author, [3])
    assert (proposal.base_len, proposal.tree.token_ids[0]) == (7, 4)
