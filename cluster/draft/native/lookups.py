"""The native ways of `cluster.draft.lookups`: see the sources."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cluster import cpp
from cluster.core import FloatArray, SamplingParams, TokenArray, TokenTree
from cluster.draft.inside import StepRows
from cluster.draft.lookups import REFERENCE, Change, Ways, Wish
from cluster.spec.params import divisor

_WORD = 0xFFFF_FFFF
_POINTER, _INT64, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_BYTES = ctypes.c_char_p
# Result and arguments.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "open_text": (_POINTER, _POINTER, _INT64),
    "close_text": (None, _POINTER),
    "set_law": (None, _POINTER, ctypes.c_uint64, _POINTER, _DOUBLE, _POINTER, _INT64),
    "draws": (None, _POINTER, _INT64, _BYTES, _BYTES, _INT64, _INT64, _POINTER),
    "advance": (None, _INT64, _POINTER, _POINTER),
    "grow": (None, _INT64, _POINTER, _DOUBLE, *(4 * (_POINTER,))),
    "open_outputs": (_POINTER, _POINTER, _INT64, _INT64, _INT64),
    "open_predicted": (_POINTER, _POINTER, _INT64, _INT64),
    "close_source": (None, _POINTER),
    "size_of": (_INT64, _POINTER),
    "keep_output": (None, _POINTER, _POINTER, _INT64),
    "open_adjacency": (_POINTER, _INT64, _INT64),
    "keep_likely": (None, _POINTER, _BYTES, _INT64, *(2 * (_BYTES, _BYTES, _INT64))),
}


@cache
def _functions() -> dict[str, Callable[..., Any]] | None:
    native = cpp.load(Path(__file__).parent, {})
    if native is None:
        return None
    # Calls of a few microseconds: to give the interpreter away for them is to wait for it.
    return {
        name: ctypes.PYFUNCTYPE(*types)((name, native.library))
        for name, types in _FUNCTIONS.items()
    }


def is_available() -> bool:
    """True if the others can be called; the first question may compile something."""
    return _functions() is not None


def _call(name: str, *arguments: Any) -> Any:
    functions = _functions()
    assert functions is not None, "ask is_available first"
    return functions[name](*arguments)


def _int64s(values: Iterable[int] | bytes) -> array[int]:
    return array("q", values)


def _at(numbers: array[int]) -> int:
    """Their address, which is valid as long as they live."""
    return numbers.buffer_info()[0]


class _Owned:
    """Something on the native side that lives as long as this object."""

    def __init__(self, address: int, close: str) -> None:
        functions = _functions()
        assert functions is not None
        self.address = address
        self._close = functions[close]

    def __del__(self) -> None:
        self._close(self.address)


class CountedText(_Owned):
    """See `cluster.draft.lookups.CountedText`."""

    def __init__(self, sizes: Sequence[int]) -> None:
        given = _int64s(sizes)
        super().__init__(_call("open_text", _at(given), len(given)), "close_text")

    def set_law(self, params: SamplingParams) -> None:
        """See there."""
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
        """See there."""
        said = _int64s(bytes(8 * len(token_ids)))
        likely = token_ids.tobytes(), logprobs.tobytes()
        _call("draws", self.address, position, *likely, *token_ids.shape, _at(said))
        return said.tolist()


class _Source(_Owned):
    def __init__(self, opening: str, *arguments: int) -> None:
        super().__init__(_call(opening, *arguments), "close_source")

    def __len__(self) -> int:
        return int(_call("size_of", self.address))


class PastOutputs(_Source):
    """See `cluster.draft.suffix.PastOutputs`."""

    def __init__(self, sizes: Sequence[int], max_tokens: int, max_matches: int) -> None:
        given = _int64s(sizes)
        super().__init__("open_outputs", _at(given), len(given), max_tokens // 2, max_matches)

    def keep(self, token_ids: TokenArray) -> None:
        _call("keep_output", self.address, token_ids.ctypes.data, len(token_ids))


class Predicted(_Source):
    """See `cluster.draft.prediction.Predicted`."""

    def __init__(self, token_ids: Sequence[int], max_places: int) -> None:
        given = _int64s(token_ids)
        super().__init__("open_predicted", _at(given), len(given), max_places)


class Adjacency(_Source):
    """See `cluster.draft.token_recycling.Adjacency`."""

    def __init__(self, max_contexts: int, max_words: int) -> None:
        super().__init__("open_adjacency", max_contexts, max_words)

    def keep(self, rows: StepRows, before: TokenArray) -> None:
        top, nodes, parents = rows.top, rows.token_ids[rows.num_context :], rows.parents
        assert top is not None
        if not len(parents) == len(nodes) == len(top.token_ids) - 1:
            raise ValueError("the rows of a step are the last one of the text and its nodes")
        _call(
            "keep_likely",
            self.address,
            before.tobytes(),
            len(before),
            nodes.tobytes(),
            parents.tobytes(),
            len(nodes),
            top.token_ids.tobytes(),
            top.logprobs.tobytes(),
            top.token_ids.shape[1],
        )


def _advance(changes: Sequence[Change]) -> None:
    rows = _int64s(
        number
        for text, rates, is_lesson, kept_len, added in changes
        for number in (text.address, rates.address, is_lesson, kept_len, len(added))
    )
    token_ids = np.concatenate([change.token_ids for change in changes], dtype=np.int32)
    _call("advance", len(changes), _at(rows), token_ids.ctypes.data)


def _grow(wishes: Sequence[Wish], min_survival: float) -> Sequence[tuple[TokenTree, FloatArray]]:
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


WAYS = Ways(CountedText, _advance, _grow)


def fastest(
    reference: Callable[..., Any], own: Callable[..., Any]
) -> tuple[Ways, Callable[..., Any]]:
    """The native ways with a native kind of source, or else the reference of both."""
    return (WAYS, own) if is_available() else (REFERENCE, reference)
