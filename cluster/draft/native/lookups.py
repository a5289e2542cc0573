"""What the look-ups keep, how they follow texts and how their trees grow, by the C++ beside this.

Count-based drafters know counts, not probabilities.  Their survival estimates come from the one
thing that predicts them well: how strong the match is (its *evidence*: tokens matched), and what
became of such matches so far.  A drafter's `Source` says what followed the end of a text.  All else
is the same for each of them.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cluster.core import FloatArray, SamplingParams, TokenArray, TokenTree
from cluster.cpp import NativeFunctions
from cluster.spec.params import divisor

# Tokens before a place that are compared with the end of a text at most; as in lookups.h.
LONGEST_MATCH = 32
# Before experience, a match of evidence n is wrong with probability _PRIOR_MISS ** n; the prior
# weighs as much as _PRIOR_WEIGHT observations.  Evidence beyond _STRONGEST counts as that; as in
# texts.cpp.
_PRIOR_MISS = 0.7
_PRIOR_WEIGHT = 8.0
_STRONGEST = 32

_WORD = 0xFFFF_FFFF
_POINTER, _INT64, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_BYTES = ctypes.c_char_p
_functions = NativeFunctions(
    Path(__file__).parent,
    {
        "open_text": (_POINTER, _POINTER, _INT64),
        "close_text": (None, _POINTER),
        "set_law": (None, _POINTER, ctypes.c_uint64, _POINTER, _DOUBLE, _POINTER, _INT64),
        "draws": (None, _POINTER, _INT64, _BYTES, _BYTES, _INT64, _INT64, _POINTER),
        "rate_of": (_DOUBLE, _POINTER, _INT64),
        "record_hit": (None, _POINTER, _INT64, _INT64),
        "advance": (None, _INT64, _POINTER, _POINTER),
        "grow": (None, _INT64, _POINTER, _DOUBLE, *(4 * (_POINTER,))),
        "open_outputs": (_POINTER, _POINTER, _INT64, _INT64, _INT64),
        "open_predicted": (_POINTER, _POINTER, _INT64, _INT64),
        "close_source": (None, _POINTER),
        "size_of": (_INT64, _POINTER),
        "keep_output": (None, _POINTER, _POINTER, _INT64),
        "open_adjacency": (_POINTER, _INT64, _INT64),
        "keep_likely": (None, _POINTER, _BYTES, _INT64, *(2 * (_BYTES, _BYTES, _INT64))),
    },
)


def _call(name: str, *arguments: Any) -> Any:
    return _functions[name](*arguments)


def _int64s(values: Iterable[int] | bytes) -> array[int]:
    return array("q", values)


def _at(numbers: array[int]) -> int:
    """Their address, which is valid as long as they live."""
    return numbers.buffer_info()[0]


class _Owned:
    """Something on the native side that lives as long as this object.

    closing: the function that ends it."""

    closing = "close_source"

    def __init__(self, opening: str, *arguments: int) -> None:
        self.address: int = _call(opening, *arguments)
        self._close = _functions[self.closing]

    def __del__(self) -> None:
        self._close(self.address)


class HitRates:
    """Probability that the target's next token is among the continuations of a match.

    address: of hits and then trials; valid as long as this object lives.
    """

    def __init__(self) -> None:
        prior = 1.0 - _PRIOR_MISS ** np.arange(_STRONGEST + 1)
        self._counts = np.stack((_PRIOR_WEIGHT * prior, np.full_like(prior, _PRIOR_WEIGHT)))
        self.address = self._counts.ctypes.data

    def rate(self, evidence: int) -> float:
        """In [0.005, 0.995]; below 1, so that survival falls along every path."""
        return float(_call("rate_of", self.address, evidence))

    def record(self, evidence: int, *, hit: bool) -> None:
        """Learn from one match; what was learned long ago fades."""
        _call("record_hit", self.address, evidence, hit)


class CountedText(_Owned):
    """The text of one request, with its n-grams of these sizes, the longest first; and the newest
    tree behind it."""

    closing = "close_text"

    def __init__(self, sizes: Sequence[int]) -> None:
        given = _int64s(sizes)
        super().__init__("open_text", _at(given), len(given))

    def set_law(self, params: SamplingParams) -> None:
        """Trees are from now on grown for these parameters."""
        limits = _int64s((params.stream & _WORD, params.max_tokens, params.min_tokens))
        stops = _int64s(params.stop_token_ids)
        _call(
            "set_law",
            self.address,
            params.noise_key,
            _at(limits),
            divisor(params),
            _at(stops),
            len(stops),
        )

    def draws(self, position: int, token_ids: TokenArray, logprobs: FloatArray) -> list[int]:
        """The target's draws at positions from this one on, each of the likely tokens there.

        token_ids, logprobs: [positions, tokens], the most probable token first."""
        said = _int64s(bytes(8 * len(token_ids)))
        likely = token_ids.tobytes(), logprobs.tobytes()
        _call("draws", self.address, position, *likely, *token_ids.shape, _at(said))
        return said.tolist()


class Source(_Owned):
    """Where drafters look up how a text goes on.  Its length is in a measure of its own."""

    def __len__(self) -> int:
        return int(_call("size_of", self.address))


class PastOutputs(Source):
    """Outputs of one store, at most max_tokens of them, in which the end of a text is looked up, as
    it is in the text itself.

    sizes: of the n-grams that are indexed, those of the texts.  max_matches: newest places that
    count in the text, and as many in outputs.
    """

    def __init__(self, sizes: Sequence[int], max_tokens: int, max_matches: int) -> None:
        given = _int64s(sizes)
        super().__init__("open_outputs", _at(given), len(given), max_tokens // 2, max_matches)

    def keep(self, token_ids: TokenArray) -> None:
        """Keep one output; of one longer than half of the bound, its end."""
        _call("keep_output", self.address, token_ids.ctypes.data, len(token_ids))


class Predicted(Source):
    """The prediction of one request, and where in it the output has got to."""

    def __init__(self, token_ids: Sequence[int], max_places: int) -> None:
        given = _int64s(token_ids)
        super().__init__("open_predicted", _at(given), len(given), max_places)


class Adjacency(Source):
    """The newest most probable tokens behind each context of at most max_words words, with
    log-probabilities."""

    def __init__(self, max_contexts: int, max_words: int) -> None:
        super().__init__("open_adjacency", max_contexts, max_words)

    def keep(
        self,
        before: TokenArray,
        nodes: TokenArray,
        parents: TokenArray,
        top: TokenArray,
        logprobs: FloatArray,
    ) -> None:
        """Keep what was likely at a step's last row of the text, behind `before`, and at its nodes.

        top, logprobs: [1 + nodes, tokens], the most probable token first."""
        if not len(parents) == len(nodes) == len(top) - 1:
            raise ValueError("the rows of a step are the last one of the text and its nodes")
        _call(
            "keep_likely",
            self.address,
            before.tobytes(),
            len(before),
            nodes.tobytes(),
            parents.tobytes(),
            len(nodes),
            top.tobytes(),
            logprobs.tobytes(),
            top.shape[1],
        )


class Change(NamedTuple):
    """Tokens that follow the first `kept_len` ones of a text.

    is_lesson: `rates` learn how many of them the newest tree had foreseen.
    """

    text: CountedText
    rates: HitRates
    is_lesson: bool
    kept_len: int
    token_ids: TokenArray


class Wish(NamedTuple):
    """A tree of at most `max_nodes` nodes.  position: output position of its first level."""

    text: CountedText
    source: Source
    rates: HitRates
    position: int
    max_nodes: int


def advance(changes: Sequence[Change]) -> None:
    """Change these texts; the newest trees behind them are forgotten."""
    rows = _int64s(
        number
        for text, rates, is_lesson, kept_len, added in changes
        for number in (text.address, rates.address, is_lesson, kept_len, len(added))
    )
    token_ids = np.concatenate([change.token_ids for change in changes], dtype=np.int32)
    _call("advance", len(changes), _at(rows), token_ids.ctypes.data)


def grow(wishes: Sequence[Wish], min_survival: float) -> Sequence[tuple[TokenTree, FloatArray]]:
    """As many trees, of the most likely nodes; min_survival: of a node."""
    rows = _int64s(
        number
        for text, source, rates, position, max_nodes in wishes
        for number in (text.address, source.address, rates.address, position, max_nodes)
    )
    # Tokens, parents and survivals, in one block of memory.
    block = np.empty((3, sum(max(wish.max_nodes, 0) for wish in wishes)), np.int32)
    first, stride = block.ctypes.data, block.strides[0]
    counts = _int64s(bytes(8 * len(wishes)))
    _call(
        "grow",
        len(wishes),
        _at(rows),
        min_survival,
        first,
        first + stride,
        first + 2 * stride,
        _at(counts),
    )
    token_ids, parents, survivals = block[0], block[1], block[2].view(np.float32)
    trees = []
    start = 0
    for count in counts:
        nodes = slice(start, start := start + count)
        trees.append((TokenTree(token_ids[nodes], parents[nodes]), survivals[nodes]))
    return trees
