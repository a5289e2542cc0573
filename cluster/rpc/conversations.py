"""The three streams of the data plane: who serves each, and the frames that both sides send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cluster.messages import EventFrame, ProposalFrame, Refusal, VerdictFrame
from cluster.rpc.codec_coordinator import EVENT, SUBMIT, error_event
from cluster.rpc.codec_draft import COMMIT, PROPOSAL
from cluster.rpc.codec_target import STEPS, VERDICT
from cluster.rpc.frames import FrameCodec
from cluster.rpc.generated import coordinator_pb2, draft_pb2, target_pb2

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Service(Generic[Ask, Answer]):
    """name: the gRPC service.  stream: its bidirectional method.  role: the server's role.  caller:
    the role of those who may call it.  asks, answers: what callers and the server send.  refuse:
    makes the answer that tells a caller which of its items were malformed."""

    name: str
    stream: str
    role: str
    caller: str
    asks: FrameCodec[Ask]
    answers: FrameCodec[Answer]
    refuse: Callable[[tuple[Refusal, ...]], Answer]


TARGET = Service(
    target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
    "Steps", "target", "coordinator", STEPS, VERDICT,
    lambda refusals: VerdictFrame(refusals=refusals),
)  # fmt: skip
DRAFTER = Service(
    draft_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name,
    "Draft", "drafter", "coordinator", COMMIT, PROPOSAL,
    lambda refusals: ProposalFrame(refusals=refusals),
)  # fmt: skip
COORDINATOR = Service(
    coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name,
    "Session", "coordinator", "ingress", SUBMIT, EVENT,
    lambda refusals: EventFrame(tuple(map(error_event, refusals))),
)  # fmt: skip
