"""What the ranks of a tensor-parallel engine say to each other in a step, in one process.

torch's fake process group takes every collective and does nothing.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from cluster.engine.channel import Channel
from cluster.engine.engine import Engine
from cluster.engine.parallel import RankGroup
from cluster.engine.work import Work
from tests.support.engine.driver import prompt
from tests.support.gpu.counting import Counting
from tests.support.gpu.steps import FEW, MORE, Counts, by_layer, step_of


@contextmanager
def ranks(count: int) -> Iterator[None]:
    """Inside, this process is rank 0 of so many."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def of_architecture(name: str, count: int) -> Counts:
    """Kernels and all-reduces a layer, and all else outside of layers, of one of so many ranks."""
    with ranks(count):
        few, more = (step_of(name, layers, count) for layers in (FEW, MORE))
    return {
        **by_layer(few.operators, more.operators, "kernels"),
        **by_layer(few.collectives, more.collectives, "collectives"),
    }


def of_commands(engine: Engine) -> Counter[str]:
    """Those of a step besides the forward's, of an engine that leads two ranks."""
    with ranks(2):
        group = object.__new__(RankGroup)  # the other rank hears nothing
        group.rank, group.world_size = 0, 2
        group._channel, group._outbox = Channel([], leads=True), []
        engine._group = group
        engine.submit(Work("one", 0, prompt(8)))
        with Counting() as counting:
            engine.step()
        engine._group = None
    return counting.collectives
