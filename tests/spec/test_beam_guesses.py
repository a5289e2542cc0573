"""Laws that a beam search guesses by the last words before them."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.core import token_array
from cluster.spec.beam_guesses import BeamGuesses

LAW = token_array([7, 8]), np.array([-0.1, -3.0], dtype=np.float32)
OTHER = token_array([9]), np.array([-0.5], dtype=np.float32)


def tokens(law: object) -> list[int]:
    assert isinstance(law, list | tuple)
    return [token for token, _ in law]


def test_of_the_prompt_it_knows_what_followed() -> None:
    guesses = BeamGuesses(token_array([1, 2, 3, 1, 2, 4]))
    assert tokens(guesses.law_after((3, 1, 2))) == [4], "the only place after all three"
    assert tokens(guesses.law_after((9, 2))) == [4], "the newest place"
    assert tokens(guesses.law_after((9, 4))) == [], "nothing followed"


def test_the_place_with_the_most_words_in_common_counts_and_then_the_newest() -> None:
    guesses = BeamGuesses(token_array([1]))
    assert tokens(guesses.learn((5, 6), LAW)) == [7, 8]
    guesses.learn((4, 6), OTHER)
    assert tokens(guesses.law_after((5, 6))) == [7, 8]
    assert tokens(guesses.law_after((3, 6))) == [9]
    guesses.learn((5, 6), OTHER)
    assert tokens(guesses.law_after((5, 6))) == [9]


def test_fewer_words_in_common_are_doubted_more() -> None:
    guesses = BeamGuesses(token_array([1]))
    guesses.learn((2, 3, 4, 5), LAW)
    found = [guesses.law_after(words)[0][1] for words in ((2, 3, 4, 5), (3, 4, 5), (4, 5), (5,))]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 4
    assert found[0] == pytest.approx(-0.1, abs=0.1)
