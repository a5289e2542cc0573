"""Guesses of laws that a beam search has not computed yet, from the laws that it has.

The beams of a search are much the same text, and each of them comes to places where another one has
been: after the same last words the law is likely to be much the same.  Of the prompt no laws are
known, but what followed its words.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core import FloatArray, TokenArray

# So many last words are compared at most.
MAX_WORDS = 4
# Of a law so many tokens are kept: hardly a beam is continued by more.
_NUM_KEPT = 6
# What is taken off the log-probabilities of a guess, by the number of words that were the same.
_DOUBTS = (0.0, 1.0, 0.3, 0.1, 0.05)
# Of a long prompt so many tokens are known.
_MAX_PROMPT = 4096

# Tokens and their log-probabilities, the most probable first.
Options = Sequence[tuple[int, float]]


class BeamGuesses:
    """The laws of one search by the last words before them."""

    def __init__(self, prompt_ids: TokenArray) -> None:
        self._laws: dict[tuple[int, ...], Options] = {}
        tokens = prompt_ids[-_MAX_PROMPT:].tolist()
        for place in range(1, len(tokens)):
            self._learn(tuple(tokens[max(place - MAX_WORDS, 0) : place]), ((tokens[place], 0.0),))

    def learn(self, words: tuple[int, ...], law: tuple[TokenArray, FloatArray]) -> Options:
        """Take in a law, and return its first tokens.

        words: the last ones before it, MAX_WORDS at most."""
        token_ids, logprobs = (each[:_NUM_KEPT].tolist() for each in law)
        options = tuple(zip(token_ids, logprobs, strict=True))
        self._learn(words, options)
        return options

    def _learn(self, words: tuple[int, ...], law: Options) -> None:
        for start in range(len(words)):
            self._laws[words[start:]] = law

    def law_after(self, words: tuple[int, ...]) -> Options:
        """Return the law at the newest place with the most of these words; nothing if there is
        none."""
        for start in range(len(words)):
            law = self._laws.get(words[start:])
            if law is not None:
                doubt = _DOUBTS[len(words) - start]
                return tuple([(token, logprob - doubt) for token, logprob in law])
        return ()
