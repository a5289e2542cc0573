"""Ranks of a target see each other's GPUs, and one that ends while they load is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any

import pytest

from cluster.errors import WorkerError
from deployments.ranks import hear, show_gpus, unless_over


@pytest.mark.parametrize(
    ("gpus", "visible", "indices"),
    [
        ((("4",), ("6",), ("5",), ("7",)), "4,6,5,7", [0, 1, 2, 3]),
        ((("0", "1"), ("2", "3")), "0,1,2,3", [0, 2]),
        ((("GPU-ab",), ("GPU-cd",)), "GPU-ab,GPU-cd", [0, 1]),
        ((("0",), ("0",)), "0", [0, 0]),  # halves of one
    ],
)
def test_every_rank_sees_all_gpus_of_the_group_in_the_same_order(
    gpus: tuple[tuple[str, ...], ...], visible: str, indices: list[int]
) -> None:
    for rank, index in enumerate(indices):
        environment = {"CUDA_VISIBLE_DEVICES": gpus[rank][0]}  # what Ray shows it
        assert show_gpus(gpus, rank, environment) == index
        assert environment["CUDA_VISIBLE_DEVICES"] == visible


def test_ranks_that_reserve_no_gpu_see_what_they_saw() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert show_gpus(((), ()), 1, environment) is None
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_a_rank_that_ends_while_the_others_load_is_noticed_at_once_with_its_reason() -> None:
    ranks: list[Future[Any]] = [Future(), Future()]

    async def load() -> str:
        ranks[1].set_exception(OSError("traceback\nno space left on device"))
        await asyncio.Event().wait()  # in a collective, for hours
        return "loaded"

    with pytest.raises(WorkerError, match="rank 2 of the target has ended: no space left"):
        asyncio.run(unless_over(load(), ranks))


async def test_a_rank_that_answers_nothing_is_noticed_and_one_that_answers_late_is_not() -> None:
    answers = iter([asyncio.sleep(0), asyncio.sleep(0.1), asyncio.Event().wait()])
    asked: list[Awaitable[Any]] = []

    def ask() -> Awaitable[Any]:
        asked.append(next(answers))
        return asked[-1]

    with pytest.raises(WorkerError, match=r"rank 2 of the target has said nothing for 0\.2 s"):
        await hear(2, ask, 0.2)
    assert len(asked) == 3


def test_what_loads_is_given_while_the_ranks_live() -> None:
    ranks: list[Future[Any]] = [Future()]

    async def load() -> str:
        return "loaded"

    assert asyncio.run(unless_over(load(), ranks)) == "loaded"
    ranks[0].set_result(None)
    with pytest.raises(WorkerError, match="rank 1 of the target has ended; the replica"):
        asyncio.run(unless_over(asyncio.Event().wait(), ranks))
