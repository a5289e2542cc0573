"""What the ranks of a tensor-parallel engine say to each other in a step, in one process.

torch's fake process group takes every collective and does nothing.  The model is split on `meta` by
transformers' own plan, as it is when it is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.distributed import DistributedConfig
from transformers.initialization import no_tie_weights

from cluster.engine.channel import Channel
from cluster.engine.engine import Engine
from cluster.engine.memory.reserve import run
from cluster.engine.parallel import RankGroup
from cluster.engine.work import Work
from tests.support.engine.driver import prompt
from tests.support.gpu.counting import Counting
from tests.support.gpu.models import config_of
from tests.support.gpu.steps import built

_ROWS = 8
_FEW, _MORE = 2, 4  # layers


@contextmanager
def ranks(count: int) -> Iterator[None]:
    """Inside, this process is rank 0 of so many."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def of_forward(name: str, count: int, num_layers: int) -> Counter[str]:
    """The collectives of a model's forward, on so many ranks."""
    config = config_of(name, num_layers)
    with ranks(count), no_tie_weights():  # as while it is loaded
        model = built(config, fuses=False)  # ranks keep the module
        kind, given = type(model.module), DistributedConfig(tp_size=count, tp_plan="auto")
        given, _, mesh = kind.prepare_distribute_model(given)
        kind.maybe_distribute_model(model.module, given, mesh)
        with Counting() as counting:
            run(model, _ROWS, _ROWS)
    return counting.collectives


def of_architecture(name: str, count: int) -> dict[str, int]:
    """All-reduces a layer, and all else outside of layers."""
    few, more = (of_forward(name, count, layers) for layers in (_FEW, _MORE))
    layer = (more - few).total() // (_MORE - _FEW)
    return {
        "collectives a layer": layer,
        "collectives outside of layers": few.total() - _FEW * layer,
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
