"""The three services of the data plane: who serves each, and the frames that both sides send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from cluster.client.generated.common_pb2 import TokenTree as TreeMessage
from cluster.core import (
    Commit,
    Proposal,
    Request,
    TokenEvent,
    TokenTree,
)
from cluster.errors import ProtocolError
from cluster.records import frozen
from cluster.requests.fields import NO_LAWS, PlainWhy
from cluster.rpc.codec import PARTS
from cluster.rpc.codec_records import TOKENS, ByHand, enum_codec, record_codec
from cluster.rpc.frames import FrameCodec, refusing
from cluster.rpc.generated import coordinator_pb2, draft_pb2, target_pb2
from cluster.rpc.messages import (
    CommitFrame,
    EventFrame,
    Open,
    PoolTree,
    ProposalFrame,
    Refusal,
    StepFrame,
    SubmitFrame,
    TextVerdict,
    VerdictFrame,
    error_event,
)

# The frames between ingress and coordinator.


_REQUEST = record_codec(Request, coordinator_pb2.Request, PARTS)
_EVENT = record_codec(TokenEvent, coordinator_pb2.TokenEvent, PARTS)


def _decode_request(message: coordinator_pb2.Request) -> Request | Refusal:
    try:
        return _REQUEST.decode(message)
    except ProtocolError as error:
        return Refusal(message.id, 0, error.code, error.message)


def _decode_event(message: coordinator_pb2.TokenEvent) -> TokenEvent:
    try:
        event = _EVENT.decode(message)
        num_tokens = len(event.token_ids)
        for what, items in (("logprobs", event.logprobs), ("sources", event.draft_sources)):
            if items and len(items) != num_tokens:
                raise ProtocolError(f"event has {num_tokens} tokens and {len(items)} {what}")
        num_ended = sum(end.num_tokens for end in event.beams)
        if event.beams and num_ended != num_tokens:
            raise ProtocolError(f"event has {num_tokens} tokens, its beams {num_ended}")
        return event
    except ProtocolError as error:
        # Tokens are missing from here on, so the text cannot go on: the request ends.
        return error_event(message.request_id, error, message.position)


SUBMIT = FrameCodec(SubmitFrame, coordinator_pb2.SubmitFrame, [_REQUEST.read_by(_decode_request)])
EVENT = FrameCodec(EventFrame, coordinator_pb2.EventFrame, [_EVENT.read_by(_decode_event)])


# The frames between coordinator and drafter.


_NODES = record_codec(TokenTree, TreeMessage)
_PROPOSAL = record_codec(
    Proposal,
    draft_pb2.Proposal,
    by_hand={
        # An absent one is empty.
        "tree": ByHand(
            ("tree",),
            lambda proposal: {"tree": _NODES.encode(proposal.tree)},
            lambda message: _NODES.decode(message.tree),
        ),
        "laws": ByHand((), None, lambda message: NO_LAWS),
    },
)
_COMMIT = refusing(record_codec(Commit, draft_pb2.Commit, PARTS))
COMMIT = FrameCodec(CommitFrame, draft_pb2.CommitFrame, [_COMMIT])
PROPOSAL = FrameCodec(ProposalFrame, draft_pb2.ProposalFrame, [_PROPOSAL])


# The frames between coordinators and targets.


def _encode_nodes(tree: PoolTree) -> dict[str, Any]:
    return {
        "token_ids": TOKENS.pack(tree.tree.token_ids),
        "parents": TOKENS.pack(tree.tree.parents),
    }


def _decode_nodes(message: target_pb2.PoolTree) -> TokenTree:
    return TokenTree(
        TOKENS.unpack(message.token_ids, "token_ids"), TOKENS.unpack(message.parents, "parents")
    )


def _decode_tree(message: target_pb2.PoolTree) -> PoolTree | None:
    """None for torn arrays: it would only have been a guess."""
    try:
        return _TREE.decode(message)
    except ProtocolError:
        return None


_OPEN = record_codec(Open, target_pb2.Open, PARTS)
_TREE = record_codec(
    PoolTree,
    target_pb2.PoolTree,
    by_hand={"tree": ByHand(("token_ids", "parents"), _encode_nodes, _decode_nodes)},
)
_WHY = enum_codec(PlainWhy, target_pb2.PlainWhy, "why", {why: why.value for why in PlainWhy})
_VERDICT = record_codec(TextVerdict, target_pb2.TextVerdict, [*PARTS, _WHY])
STEPS = FrameCodec(StepFrame, target_pb2.StepFrame, [refusing(_OPEN), _TREE.read_by(_decode_tree)])
# To the coordinator, an unreadable verdict is a refusal of its text.
VERDICT = FrameCodec(VerdictFrame, target_pb2.VerdictFrame, [refusing(_VERDICT), _WHY])


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
    lambda refusals: EventFrame(tuple(error_event(each.request_id, each) for each in refusals)),
)
SERVICES: Mapping[str, Service[Any, Any]] = {
    each.role: each for each in (TARGET, DRAFTER, COORDINATOR)
}
