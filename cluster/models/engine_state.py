"""What a worker says of the engine that computes its model."""

from __future__ import annotations

from cluster.records import frozen


@frozen
class EngineState:
    """The device and the kernels that an engine has settled on.

    name: of the resident whose engine it is, "" = the worker's own.  device: cpu or cuda:N.
    attention: native, triton or sdpa.  graphs: cuda or none.  kernels: of the other layers on a
    CPU (native, packed or torch), of the draws on a GPU (triton or torch).  kv_bytes,
    kv_tokens: size of the KV cache.  fallbacks: slow parts, and why.  weights: their format.
    products: the instructions that multiply weights in few bits on a CPU, "" = it has none.
    """

    name: str
    device: str
    attention: str
    graphs: str
    kernels: str
    kv_bytes: int
    kv_tokens: int
    fallbacks: tuple[str, ...] = ()
    weights: str = ""
    products: str = ""
