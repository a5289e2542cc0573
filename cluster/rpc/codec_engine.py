"""What an engine computes with, on the wire."""

from __future__ import annotations

from cluster.client.generated import common_pb2 as pb
from cluster.messages import EngineState


def encode_engine(engine: EngineState) -> pb.EngineState:
    return pb.EngineState(
        name=engine.name,
        device=engine.device,
        attention=engine.attention,
        graphs=engine.graphs,
        kernels=engine.kernels,
        kv_bytes=engine.kv_bytes,
        kv_tokens=engine.kv_tokens,
        fallbacks=engine.fallbacks,
    )


def decode_engine(message: pb.EngineState) -> EngineState:
    return EngineState(
        name=message.name,
        device=message.device,
        attention=message.attention,
        graphs=message.graphs,
        kernels=message.kernels,
        kv_bytes=message.kv_bytes,
        kv_tokens=message.kv_tokens,
        fallbacks=tuple(message.fallbacks),
    )
