from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.answers import Answer
from benchmarks.ceiling import MergedDrafters, ceiling, tokens_per_second
from cluster.config import DrafterConfig
from cluster.core import SamplingParams, token_array
from cluster.draft.base import Drafter, DrafterContext
from cluster.draft.registry import create
from cluster.draft.replay import Recording, replay
from cluster.spec.step_profile import StepProfile


def _drafter(kind: str) -> Drafter:
    return create(kind, DrafterConfig(kind=kind), DrafterContext(kind, 16, 1))


def _recording(tokens: Sequence[int], prompt_len: int) -> Recording:
    return Recording(
        token_array(tokens[:prompt_len]), token_array(tokens[prompt_len:]),
        SamplingParams(temperature=0.0, max_tokens=200),
    )  # fmt: skip


def test_the_ceiling_weighs_tokens_by_the_time_of_their_rows() -> None:
    profile = StepProfile((1, 2, 4, 8), (0.010, 0.010, 0.010, 0.040))
    assert ceiling({1: 1.8, 3: 2.5, 7: 4.0}, profile) == (3, pytest.approx(2.5))


def test_a_drafter_together_with_another_is_no_worse_than_alone_on_text_that_repeats() -> None:
    words = np.random.default_rng(2).integers(0, 50, 20).tolist()
    recording = _recording(words * 6, 40)
    alone = replay(_drafter("suffix"), recording, 4)
    both = replay(MergedDrafters([_drafter("suffix"), _drafter("prompt_lookup")]), recording, 4)
    assert both.mean_acceptance_length >= alone.mean_acceptance_length > 3.0
    assert both.num_draft_tokens <= 4 * both.num_rounds


def test_a_drafter_without_a_tree_does_not_change_the_merged_tree() -> None:
    """The n-gram cache has seen no output yet; prompt lookup finds the repetition."""
    recording = _recording([1, 2, 3, 4, 5, 6] * 4, 12)
    alone = replay(_drafter("suffix"), recording, 4)
    both = replay(MergedDrafters([_drafter("ngram_cache"), _drafter("suffix")]), recording, 4)
    assert both.num_accepted == alone.num_accepted > 0


def test_tokens_of_a_first_event_are_not_decoded_in_the_time_that_is_counted() -> None:
    answers = [
        Answer(0.0, ((1.0, 3), (2.0, 13)), (0,) * 13),
        Answer(2.0, ((3.0, 1), (4.0, 31)), ()),
    ]
    assert tokens_per_second(answers) == pytest.approx(20.0)
