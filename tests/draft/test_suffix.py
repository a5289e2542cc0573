"""Drafts from the request's own text and from past outputs; and along the output that the client
expects, to which they come back after every edit."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.replay.along import Recording, ReplayStats, replay
from cluster.core import EMPTY_TREE, Proposal, SamplingParams, token_array
from cluster.draft.base import DrafterContext
from cluster.draft.suffix import (
    PredictionDrafter,
    PredictionOptions,
    PromptLookupOptions,
    SuffixDrafter,
    SuffixOptions,
)
from cluster.spec.tree import walk
from tests.support.draft.author import GREEDY, Author, grow, write
from tests.support.errors import config_error


def drafter(max_nodes: int = 16, **options: object) -> SuffixDrafter:
    return SuffixDrafter(DrafterContext("suffix", max_nodes, 8), SuffixOptions(**options))


def text_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 500, 40).tolist()


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
        finish(suffix, author, text_of(number))
    for number, is_known in ((19, True), (17, True), (16, False)):
        author = Author(text_of(number)[:10], request_id=f"next {number}", tenant=b"%d" % number)
        assert (write(suffix, author, []) is not None) == is_known


def test_an_end_of_the_text_that_is_never_looked_up_is_refused():
    with config_error("min_ngram: 9 exceeds max_ngram, 8"):
        SuffixOptions(min_ngram=9)


def lookup(max_nodes: int = 16) -> SuffixDrafter:
    return SuffixDrafter(DrafterContext("lookup", max_nodes, 8), PromptLookupOptions(min_ngram=2))


def test_prompt_lookup_keeps_no_outputs():
    looking = lookup()
    finish(looking, Author([7, 8, 9]), [50, 51, 52])
    assert len(looking._outputs((b"", "default"))) == 0
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


# A prediction.

NEWLINE, INDENT = 0, 1
PROMPT = [3, 1, 4, 1, 5]


def predicting() -> PredictionDrafter:
    return PredictionDrafter(DrafterContext("prediction", 12, 8), PredictionOptions())


def lines(count: int, seed: int) -> list[list[int]]:
    """Lines that share many words, as those of a program do: few words, often the same ones."""
    random = np.random.default_rng(seed)
    return [
        [INDENT] * int(random.integers(0, 3))
        + (2 + random.zipf(1.5, int(random.integers(5, 16))) % 60).tolist()
        + [NEWLINE]
        for _ in range(count)
    ]


def joined(parts: Sequence[Sequence[int]]) -> list[int]:
    return [token for part in parts for token in part]


def along(
    predicted: Sequence[Sequence[int]], output: Sequence[Sequence[int]], temperature: float = 0.0
) -> tuple[ReplayStats, list[int]]:
    """The replay of `output` with `predicted`, and how many drafts each round accepted."""
    params = dataclasses.replace(
        GREEDY, prediction=tuple(joined(predicted)), temperature=temperature, max_tokens=10_000
    )
    output_ids = token_array(joined(output))
    accepted = []

    def judge(proposal: Proposal, node: int) -> None:
        start = proposal.base_len - len(PROMPT)
        accepted.append(len(walk(proposal.tree, output_ids[start:])))

    recording = Recording(token_array(PROMPT), output_ids, params)
    return replay(predicting(), recording, 12, judge=judge), accepted


def test_a_right_prediction_is_drafted_from_its_first_token_to_its_last():
    predicted = lines(20, 0)
    stats, accepted = along(predicted, predicted)
    assert stats.num_accepted >= len(joined(predicted)) - stats.num_rounds - 1
    assert accepted[0] == 12
    assert stats.mean_acceptance_length > 12


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nine_tenths_unchanged_give_more_than_six_tokens_a_step(temperature: float):
    total = ReplayStats()
    for seed in range(3):
        predicted, fresh = lines(60, seed), lines(60, seed + 100)
        output = list(predicted)
        for place in np.random.default_rng(seed).choice(60, 6, replace=False):
            output[place] = fresh[place]
        total += along(predicted, output, temperature)[0]
    assert total.mean_acceptance_length > 6.0


@pytest.mark.parametrize("edit", ["inserted", "deleted", "replaced"])
def test_drafts_recover_fully_after_an_edited_line(edit: str):
    for seed in range(3):
        predicted, fresh = lines(30, seed), lines(3, seed + 100)
        after = 15 if edit == "inserted" else 16
        new = [] if edit == "deleted" else [fresh[0]]
        output = [*predicted[:15], *new, *predicted[after:]]
        stats, accepted = along(predicted, output)
        # Beside the rounds of unchanged text, no more than one per word of the new line, and two
        # that find the place behind it.
        full = len(joined(predicted)) // 13 + 1
        assert stats.num_rounds <= full + len(joined(new)) + 3
        assert accepted[-3:-1] == [12, 12]


def test_a_shifted_line_is_found_again_where_it_went():
    predicted = lines(40, 1)
    output = [*predicted[20:30], *predicted[:20]]
    stats, accepted = along(predicted, output)
    assert stats.mean_acceptance_length > 6.0
    assert accepted[-2] == 12


def test_a_wrong_prediction_claims_less_than_a_token_a_step_although_words_recur():
    predicted, output = lines(60, 2), lines(60, 3)
    stats, _ = along(predicted, output)
    assert stats.num_predicted < stats.num_rounds


def test_an_output_that_is_cut_is_followed_again_from_its_beginning():
    params = dataclasses.replace(GREEDY, prediction=tuple(range(20, 40)))
    author, drafts = Author(PROMPT, params), predicting()
    write(drafts, author, [])
    assert write(drafts, author, [20, 30, 31, 32, 33, 34]).tree.token_ids[0] == 35
    author.tokens[len(PROMPT) :] = []
    assert write(drafts, author, [20]).tree.token_ids[0] == 21


def test_without_a_prediction_there_is_no_draft():
    assert write(predicting(), Author(PROMPT), []) is None


def test_each_side_of_an_edit_is_a_branch_while_it_is_unclear_which_one_it_is():
    """After an unknown word the next predicted one may follow, or the one behind it."""
    params = dataclasses.replace(GREEDY, prediction=(10, 11, 12, 13, 14, 15))
    author, drafts = Author(PROMPT, params), predicting()
    write(drafts, author, [])
    proposal = write(drafts, author, [10, 11, 50])
    roots = proposal.tree.token_ids[proposal.tree.parents == -1]
    assert set(roots.tolist()) == {12, 13}
