"""Ranks that hold other pages, in whichever kind of layer, are told apart before they compute."""

from dataclasses import replace

import pytest
import torch

from cluster.config.schema import EngineConfig
from cluster.core import token_array
from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.memory.page_owners import PageOwners
from cluster.engine.schedule.batch import Pick
from cluster.engine.schedule.scheduler import Schedule
from cluster.engine.types import LayerSpec
from cluster.engine.work import Work

FULL = LayerSpec(1, 1, torch.float32, torch.device("cpu"))
LAYERS = (FULL, replace(FULL, window=8))
PAGE_SIZE = 4


def _told(*, taken: int | None = None, num_pages: tuple[int, int] = (16, 16)) -> str:
    """Of one rank's step.  taken: the group whose first page somebody else holds there."""
    page_owners = PageOwners(
        KVCache(LAYERS, num_pages, PAGE_SIZE), EngineConfig(prefix_cache=False)
    )
    if taken is not None:
        page_owners.pools[taken].allocate()
    sequence = page_owners.enter("a")
    page_owners.reserve(sequence, 6)
    if taken is not None:
        # The pools count alike again: the step's slots alone differ.
        page_owners.pools[taken].drop(0)
    pick = Pick(sequence, Work("a", 0, token_array(range(6))), 6, completes=True)
    return repr(Schedule([pick], num_rows=6).told(page_owners.pools))


def test_equal_ranks_agree():
    assert _told() == _told()


@pytest.mark.parametrize("group", [0, 1])
def test_other_slots_in_either_kind_of_layer_are_another_step(group: int):
    assert _told(taken=group) != _told()


@pytest.mark.parametrize("num_pages", [(15, 16), (16, 15)])
def test_another_number_of_free_pages_in_either_pool_is_another_step(
    num_pages: tuple[int, int],
):
    assert _told(num_pages=num_pages) != _told()
