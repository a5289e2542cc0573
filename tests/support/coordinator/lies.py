"""Lies of every form that a proposal can take, for the tests of what they cost: nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cluster.client.generated.common_pb2 import TokenTree as TreeMessage
from cluster.core import Proposal, TokenTree
from cluster.rpc.codec_records import Codec
from cluster.rpc.frames import FrameCodec
from cluster.rpc.generated import draft_pb2
from cluster.rpc.messages import ProposalFrame
from tests.support.coordinator.toys import VOCAB_SIZE

# Fields of a frame are unsigned, so what a drafter means as -1 arrives as the greatest.
_MASKS = {"base_len": 2**32 - 1, "generation": 2**64 - 1, "prefix_hash": 2**64 - 1}

# What is made of the honest value of a field.
_Made = Callable[[np.random.Generator, Any], Any]


def _like(make: Callable[[np.random.Generator, int], Any]) -> _Made:
    """An array of the same length and type."""
    return lambda generator, values: np.array(make(generator, len(values)), dtype=values.dtype)


def _as(dtype: str) -> _Made:
    return lambda _, values: values.astype(dtype)


def _moved(step: int) -> _Made:
    return lambda _, number: number + step


_ARRAY: list[_Made] = [
    lambda _, values: values[:0],
    lambda _, values: values[:-1],
    lambda _, values: np.append(values, values),
    lambda _, values: np.stack([values, values]),
    *map(_as, ("int64", "uint32", "float64", "float16", "bool", "object")),
]
_NUMBERS = [_moved(step) for step in (-1, 1, 2, 5, -1000, 2**31, 2**40, 2**64)]
_CHANGES: dict[str, list[_Made]] = {
    "token_ids": [
        *_ARRAY,
        lambda _, ids: np.zeros_like(ids),
        lambda _, ids: ids + np.int32(VOCAB_SIZE),
        lambda _, ids: -ids - np.int32(1),
        _like(lambda generator, size: generator.integers(-(2**31), 2**31 - 1, size)),
    ],
    "parents": [
        *_ARRAY,
        lambda _, parents: parents[::-1].copy(),
        _like(lambda _, size: range(size)),
        _like(lambda _, size: range(1, size + 1)),
        _like(lambda _, size: [size - 1] * size),
        _like(lambda _, size: [-1] * size),
        _like(lambda _, size: [500] * size),
        _like(lambda generator, size: generator.integers(-2, size + 2, size)),
    ],
    "survival": [
        *_ARRAY,
        lambda _, values: -values,
        *(_like(lambda _, size, of=of: [of] * size) for of in (np.nan, np.inf, 0.0, 1.0)),
        _like(lambda _, size: np.linspace(0.1, 1.0, size)),
        _like(lambda _, size: [np.nan if place == 1 else 0.1 for place in range(size)]),
        _like(lambda generator, size: generator.random(size)),
    ],
    **dict.fromkeys(_MASKS, _NUMBERS),
}


@dataclass(frozen=True)
class Lie:
    """What is changed of an honest proposal.

    size: nodes of a chain made up in its place, None = its own tree.  changes: fields, and which of
    the changes of each."""

    seed: int
    size: int | None
    changes: Sequence[tuple[str, int]]

    def told(self, honest: Proposal) -> Proposal:
        """The proposal as it is sent within a process; told again, it has other numbers."""
        generator = np.random.default_rng((self.seed, honest.prefix_hash))
        tree, survival = honest.tree, honest.survival
        if self.size is not None:
            tree = TokenTree.chain(generator.integers(0, VOCAB_SIZE, self.size))
            survival = np.full(self.size, 0.5, np.float32)
        values: dict[str, Any] = {name: getattr(honest, name) for name in _MASKS}
        values |= {"token_ids": tree.token_ids, "parents": tree.parents, "survival": survival}
        with np.errstate(all="ignore"):
            for name, number in self.changes:
                values[name] = _CHANGES[name][number](generator, values[name])
        told = TokenTree(values.pop("token_ids"), values.pop("parents"))
        return replace(honest, tree=told, **values)


def lies() -> st.SearchStrategy[Lie]:
    """Most of them are wrong in one thing: where that is certain, nobody looks at the rest."""
    numbered = [(name, number) for name, made in _CHANGES.items() for number in range(len(made))]
    sizes = st.none() | st.sampled_from([0, 1, 9, 64, 80, 300, 1024, 3000])
    changes = st.lists(st.sampled_from(numbered), max_size=2, unique_by=lambda each: each[0])
    return st.builds(Lie, st.integers(0, 2**32 - 1), sizes, changes)


def _to_message(told: Proposal) -> draft_pb2.Proposal:
    """Like the codec, but what does not fit is cut to size."""
    return draft_pb2.Proposal(
        request_id=told.request_id,
        **{name: int(getattr(told, name)) & mask for name, mask in _MASKS.items()},
        survival=_numbers(told.survival, np.float32),
        tree=TreeMessage(
            token_ids=_numbers(told.tree.token_ids, np.int32),
            parents=_numbers(told.tree.parents, np.int32),
        ),
    )


def _numbers(array: np.ndarray, dtype: type) -> list[float]:
    with np.errstate(all="ignore"):
        found: list[float] = array.astype(dtype).ravel().tolist()
    return found


# What the lying side of a stream speaks.
LYING = FrameCodec(
    ProposalFrame,
    draft_pb2.ProposalFrame,
    [Codec(Proposal, draft_pb2.Proposal.DESCRIPTOR.full_name, _to_message, lambda message: None)],
)
