"""Drafts along the output that the client expects, and comes back to it after every edit."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.replay.along import Recording, ReplayStats, replay
from cluster.core import Proposal, token_array
from cluster.draft.base import DrafterContext
from cluster.draft.suffix import PredictionDrafter, PredictionOptions
from cluster.spec.tree import walk
from tests.support.draft.author import GREEDY, Author, write

NEWLINE, INDENT = 0, 1
PROMPT = [3, 1, 4, 1, 5]


def drafter(max_nodes: int = 12, **options: object) -> PredictionDrafter:
    context = DrafterContext("prediction", max_nodes, 8)
    return PredictionDrafter(context, PredictionOptions(**options))  # type: ignore[arg-type]


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
    accepted: list[int] = []

    def judge(proposal: Proposal, node: int) -> None:
        start = proposal.base_len - len(PROMPT)
        accepted.append(len(walk(proposal.tree, output_ids[start:])))

    recording = Recording(token_array(PROMPT), output_ids, params)
    return replay(drafter(), recording, 12, judge=judge), accepted


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
    author, drafts = Author(PROMPT, params), drafter()
    write(drafts, author, [])
    assert write(drafts, author, [20, 30, 31, 32, 33, 34]).tree.token_ids[0] == 35
    author.tokens[len(PROMPT) :] = []
    assert write(drafts, author, [20]).tree.token_ids[0] == 21


def test_without_a_prediction_there_is_no_draft():
    assert write(drafter(), Author(PROMPT), []) is None


def test_each_side_of_an_edit_is_a_branch_while_it_is_unclear_which_one_it_is():
    """After an unknown word the next predicted one may follow, or the one behind it."""
    params = dataclasses.replace(GREEDY, prediction=(10, 11, 12, 13, 14, 15))
    author, drafts = Author(PROMPT, params), drafter()
    write(drafts, author, [])
    proposal = write(drafts, author, [10, 11, 50])
    roots = proposal.tree.token_ids[proposal.tree.parents == -1]
    assert set(roots.tolist()) == {12, 13}
