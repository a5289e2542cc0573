"""The three services of the data plane: who serves each, and the frames that both sides send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from cluster.messages import EventFrame, ProposalFrame, Refusal, VerdictFrame
from cluster.records import frozen
from cluster.rpc.codec_coordinator import EVENT, SUBMIT, error_event
from cluster.rpc.codec_draft import COMMIT, PROPOSAL
from cluster.rpc.codec_target import STEPS, VERDICT
from cluster.rpc.frames import FrameCodec
from cluster.rpc.generated import coordinator_pb2, draft_pb2, target_pb2

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


@frozen
class Call:
    """A call beside the stream.  kind: as gRPC names it in its functions."""

    method: str
    kind: str
    request: Any
    answer: Any


@frozen
class Service(Generic[Ask, Answer]):
    """role: the server's.  caller: the role of those who may call it.  asks, answers: what callers
    and the server send on its one bidirectional stream.  refuse: makes the answer that tells a
    caller which of its items were malformed."""

    descriptor: ServiceDescriptor
    role: str
    caller: str
    asks: FrameCodec[Ask]
    answers: FrameCodec[Answer]
    refuse: Callable[[tuple[Refusal, ...]], Answer]

    @property
    def name(self) -> str:
        return self.descriptor.full_name

    @property
    def stream(self) -> str:
        return next(each.name for each in self.descriptor.methods if each.client_streaming)

    def call(self, name: str) -> Call:
        method = self.descriptor.methods_by_name[name]
        return Call(
            f"/{self.name}/{name}",
            "unary_stream" if method.server_streaming else "unary_unary",
            GetMessageClass(method.input_type),
            GetMessageClass(method.output_type),
        )


TARGET = Service(
    target_pb2.DESCRIPTOR.services_by_name["TargetService"],
    "target",
    "coordinator",
    STEPS,
    VERDICT,
    lambda refusals: VerdictFrame(refusals=refusals),
)
DRAFTER = Service(
    draft_pb2.DESCRIPTOR.services_by_name["DrafterService"],
    "drafter",
    "coordinator",
    COMMIT,
    PROPOSAL,
    lambda refusals: ProposalFrame(refusals=refusals),
)
COORDINATOR = Service(
    coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"],
    "coordinator",
    "ingress",
    SUBMIT,
    EVENT,
    lambda refusals: EventFrame(tuple(map(error_event, refusals))),
)
