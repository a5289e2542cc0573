"""Lies of every form that a proposal can take, for the tests of what they cost: nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cluster.client.generated.common_pb2 import TokenTree as TreeMessage
from cluster.core import Proposal, TokenTree
from cluster.messages import ProposalFrame
from cluster.rpc.codec_records import Codec
from cluster.rpc.frames import FrameCodec
from cluster.rpc.generated import draft_pb2
from tests.support.coordinator.toys import VOCAB_SIZE

_INT32 = st.integers(-(2**31), 2**31 - 1)
_SIZES = st.integers(0, 12) | st.sampled_from([64, 80, 300, 1024, 3000])
_WRONG_TYPES = ("int64", "uint32", "float64", "float16", "bool", "object")
# Fields of a frame are unsigned, so what a drafter means as -1 arrives as the greatest.
_MASKS = {"base_len": 2**32 - 1, "generation": 2**64 - 1, "prefix_hash": 2**64 - 1}


@dataclass(frozen=True)
class Lie:
    """What is changed of an honest proposal; None = left as it is.

    size: nodes of a tree made up in its place, of numbers drawn from `seed`.  ids, parents,
    survivals: what kind of numbers; a list stands for itself.  numbers: added to the fields of
    that name.  dtypes: of token_ids, parents and survival.  is_square: they have two dimensions.
    """

    seed: int = 0
    size: int | None = None
    ids: str | list[int] | None = None
    parents: str | list[int] | None = None
    survivals: str | list[float] | None = None
    numbers: dict[str, int] = field(default_factory=dict)
    dtypes: tuple[str | None, str | None, str | None] = (None, None, None)
    is_square: bool = False

    def told(self, honest: Proposal) -> Proposal:
        """The proposal as it is sent within a process; told again, it has other numbers."""
        generator = np.random.default_rng((self.seed, honest.prefix_hash))
        ids, parents, survival = honest.tree.token_ids, honest.tree.parents, honest.survival
        if self.size is not None:
            ids = generator.integers(0, VOCAB_SIZE, self.size).astype(np.int32)
            parents = np.arange(-1, self.size - 1, dtype=np.int32)
            survival = np.full(self.size, 0.5, np.float32)
        arrays = [
            _IDS[self.ids](generator, ids) if isinstance(self.ids, str) else _own(self.ids, ids),
            _PARENTS[self.parents](generator, parents)
            if isinstance(self.parents, str)
            else _own(self.parents, parents),
            _SURVIVALS[self.survivals](generator, survival)
            if isinstance(self.survivals, str)
            else _own(self.survivals, survival),
        ]
        for place, dtype in enumerate(self.dtypes):
            if dtype is not None:
                with np.errstate(all="ignore"):
                    arrays[place] = arrays[place].astype(dtype)
        if self.is_square:
            arrays = [np.stack([array, array]) for array in arrays]
        changes = {name: getattr(honest, name) + step for name, step in self.numbers.items()}
        return replace(honest, tree=TokenTree(*arrays[:2]), survival=arrays[2], **changes)


def _own(given: Sequence[float] | None, honest: np.ndarray) -> np.ndarray:
    return honest if given is None else np.array(given, dtype=honest.dtype)


_Made = Callable[[np.random.Generator, np.ndarray], np.ndarray]
_IDS: dict[str, _Made] = {
    "same": lambda _, ids: np.zeros_like(ids),
    "beyond": lambda _, ids: ids + np.int32(VOCAB_SIZE),
    "negative": lambda _, ids: -ids - np.int32(1),
}
_PARENTS: dict[str, _Made] = {
    "itself": lambda _, parents: np.arange(len(parents), dtype=np.int32),
    "next": lambda _, parents: np.arange(1, len(parents) + 1, dtype=np.int32),
    "last": lambda _, parents: np.full(len(parents), len(parents) - 1, np.int32),
    "root": lambda _, parents: np.full(len(parents), -1, np.int32),
    "beyond": lambda _, parents: np.full(len(parents), 500, np.int32),
    "any": lambda generator, parents: generator.integers(-2, len(parents) + 2, len(parents)).astype(
        np.int32
    ),
    "backwards": lambda _, parents: parents[::-1].copy(),
}
_SURVIVALS: dict[str, _Made] = {
    "nan": lambda _, values: np.full_like(values, np.nan),
    "infinite": lambda _, values: np.full_like(values, np.inf),
    "certain": lambda _, values: np.ones_like(values),
    "none": lambda _, values: np.zeros_like(values),
    "negative": lambda _, values: -values,
    "growing": lambda _, values: np.linspace(0.1, 1.0, len(values), dtype=np.float32),
    "any": lambda generator, values: generator.random(len(values), np.float32),
    "one nan": lambda _, values: np.where(np.arange(len(values)) == 1, np.nan, values).astype(
        np.float32
    ),
}


def lies() -> st.SearchStrategy[Lie]:
    """Of any form; most of them are wrong in one thing."""
    floats = st.floats(width=32)
    dtypes = st.none() | st.sampled_from(_WRONG_TYPES)
    numbers = {
        "base_len": st.sampled_from([-1, 1, 5, -1000, 2**31, 2**40]) | st.integers(-3, 3),
        "generation": st.sampled_from([-1, 1, 2**64]),
        "prefix_hash": st.sampled_from([-1, 1, 2**64]),
    }
    return st.builds(
        Lie,
        seed=st.integers(0, 2**32 - 1),
        size=st.none() | _SIZES,
        ids=st.none() | st.sampled_from(sorted(_IDS)) | st.lists(_INT32, max_size=8),
        parents=st.none() | st.sampled_from(sorted(_PARENTS)) | st.lists(_INT32, max_size=8),
        survivals=st.none() | st.sampled_from(sorted(_SURVIVALS)) | st.lists(floats, max_size=8),
        numbers=_seldom({}, st.fixed_dictionaries({}, optional=numbers)),
        dtypes=_seldom((None, None, None), st.tuples(dtypes, dtypes, dtypes)),
        is_square=_seldom(False, st.just(True)),
    )


def _seldom(usual: Any, others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Where one thing is wrong for certain, nobody looks at the rest."""
    return st.integers(0, 5).flatmap(lambda die: st.just(usual) if die else others)


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
