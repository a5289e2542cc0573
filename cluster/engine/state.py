"""An engine's means of computing, for Describe: as it settled at load, not as configured."""

from __future__ import annotations

from cluster import cpp
from cluster.engine.cpu import kernels
from cluster.engine.cpu.packed_linear import is_native
from cluster.engine.engine import Engine
from cluster.models.engine_state import EngineState

# What `kernels` says where the draws of a GPU are no kernel of ours.
TORCH = "torch"


def engine_state(engine: Engine, name: str = "", draws: str = TORCH) -> EngineState:
    """name: as in EngineState.  draws: what draws tokens on a GPU."""
    on_gpu = engine.device.type == "cuda"
    native = None if on_gpu else kernels.load()
    products = native.products if native is not None and engine.model.weights else ""
    slow = "plain C multiplies weights in few bits: this processor has no instructions for that"
    instead = slow if products == "c" != cpp.mode() else engine.model.instead
    return EngineState(
        name=name,
        device=str(engine.device),
        attention=engine.forward.attention,
        graphs="cuda" if engine.uses_graphs else "none",
        kernels=draws if on_gpu else _layers(engine),
        weights=engine.model.weights or str(engine.layers[0].dtype).removeprefix("torch."),
        kv_bytes=engine.cache.num_bytes,
        kv_tokens=engine.cache.num_pages[0] * engine.cache.page_size,
        products=products,
        fallbacks=(*filter(None, (instead,)), *engine.forward.fallbacks),
    )


def _layers(engine: Engine) -> str:
    """The name of the library that computes a model's layers on a CPU."""
    model = engine.model
    if model.native is not None:
        return "native"
    return "packed" if is_native(model.module) else TORCH
