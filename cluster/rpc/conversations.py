"""The frame types that each side sends on the three streams of the data plane."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.messages import (
    CommitFrame,
    EventFrame,
    ProposalFrame,
    Refusal,
    StepFrame,
    SubmitFrame,
    VerdictFrame,
)
from cluster.rpc.codec_coordinator import EVENT, SUBMIT, error_event
from cluster.rpc.codec_draft import COMMIT, PROPOSAL
from cluster.rpc.codec_target import STEPS, VERDICT
from cluster.rpc.generated import coordinator_pb2, draft_pb2, target_pb2
from cluster.rpc.stream import Conversation


@dataclass(frozen=True, slots=True)
class Service:
    """name: the gRPC service.  stream: its bidirectional method.  role: the server's role.  caller:
    the role of those who may call it."""

    name: str
    stream: str
    role: str
    caller: str


TARGET = Service(
    target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
    stream="Steps",
    role="target",
    caller="coordinator",
)
DRAFTER = Service(
    draft_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name,
    stream="Draft",
    role="drafter",
    caller="coordinator",
)
COORDINATOR = Service(
    coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name,
    stream="Session",
    role="coordinator",
    caller="ingress",
)


def _refuse_items(refusals: tuple[Refusal, ...]) -> VerdictFrame:
    return VerdictFrame(refusals=refusals)


def _refuse_commits(refusals: tuple[Refusal, ...]) -> ProposalFrame:
    return ProposalFrame(refusals=refusals)


def _refuse_requests(refusals: tuple[Refusal, ...]) -> EventFrame:
    return EventFrame(tuple(error_event(refusal) for refusal in refusals))


ASK_TARGET: Conversation[StepFrame, VerdictFrame] = Conversation(STEPS, VERDICT)
ANSWER_AS_TARGET: Conversation[VerdictFrame, StepFrame] = Conversation(
    VERDICT, STEPS, _refuse_items
)
ASK_DRAFTER: Conversation[CommitFrame, ProposalFrame] = Conversation(COMMIT, PROPOSAL)
ANSWER_AS_DRAFTER: Conversation[ProposalFrame, CommitFrame] = Conversation(
    PROPOSAL, COMMIT, _refuse_commits
)
ASK_COORDINATOR: Conversation[SubmitFrame, EventFrame] = Conversation(SUBMIT, EVENT)
ANSWER_AS_COORDINATOR: Conversation[EventFrame, SubmitFrame] = Conversation(
    EVENT, SUBMIT, _refuse_requests
)
