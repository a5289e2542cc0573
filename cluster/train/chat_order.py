"""In which order a chat model's answers are read, fixed by a seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cluster.train.chat_answers import Answer

Batch_co = TypeVar("Batch_co", covariant=True)

# So many micro-batches are filled from one sorted part of the order.
_BATCHES_PER_POOL = 16


class ConversationOrder(ABC, Generic[Batch_co]):
    """An `Order` of whole conversations; neighbours are of similar length, to pad little."""

    def __init__(self, answers: Sequence[Answer], seed: int) -> None:
        self._answers = answers
        self._seed = seed
        self._lengths = np.array([len(each.prompt) + len(each.token_ids) for each in answers])

    @abstractmethod
    def batch(self, answers: Sequence[Answer]) -> Batch_co:
        """Conversations side by side, padded to the longest."""

    def read(self, first: int, count: int) -> Batch_co:
        """See `Order`."""
        chosen: list[Answer] = []
        while len(chosen) < count:
            epoch, index = divmod(first + len(chosen), len(self._answers))
            order = self._epoch(epoch, count)[index : index + count - len(chosen)]
            chosen += [self._answers[each] for each in order]
        return self.batch(chosen)

    def _epoch(self, epoch: int, count: int) -> NDArray[np.int64]:
        generator = np.random.default_rng((self._seed, epoch))
        order = generator.permutation(len(self._answers))
        pool = _BATCHES_PER_POOL * count
        pools = [order[start : start + pool] for start in range(0, len(order), pool)]
        by_length = [each[np.argsort(self._lengths[each], kind="stable")] for each in pools]
        batches = [
            each[start : start + count]
            for each in by_length
            for start in range(0, len(each), count)
        ]
        return np.concatenate([batches[index] for index in generator.permutation(len(batches))])
