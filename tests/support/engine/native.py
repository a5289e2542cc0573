"""Our own kernels: where they are, and in which formats a model's layers multiply with them."""

import pytest

from cluster.engine.cpu.kernels import Format, load
from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.engine.engine import Engine

needs_native = pytest.mark.skipif(load() is None, reason="needs a C++ compiler")


def formats(engine: Engine) -> set[Format]:
    modules = engine.model.module.modules()
    return {each.format for each in modules if isinstance(each, PackedLinear)}
