"""Damaged messages: every decoder and every server refuses them, and goes on serving others.

DRAFTHOUSE_MUTATIONS says how many there are; a nightly run sets it to 10000.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from cluster.client.generated import generation_pb2
from cluster.core import Commit, Request, SamplingParams, token_array
from cluster.errors import DrafthouseError
from cluster.messages import CommitFrame, SubmitFrame
from cluster.rpc import codec_generation as public
from cluster.rpc import conversations as talk
from cluster.rpc.channel import connect_coordinator, connect_drafter, connect_target
from cluster.rpc.frames import FrameCodec
from cluster.rpc.server import serve_coordinator, serve_drafter, serve_target
from tests.rpc.test_streams import frame as step_frame
from tests.support.rpc import frames_strategy as frames
from tests.support.rpc.generation_strategy import public_requests, public_responses
from tests.support.rpc.mutations import (
    MAX_GROWTH_BYTES,
    NUM_MUTATIONS,
    damaged,
    generating,
    mutated,
)
from tests.support.rpc.toys import EchoCoordinator, EchoDrafter, EchoTarget, stopping

PATIENCE_S = 20.0
# A stream ends with the first message that is not a frame; those after it are not read.
MESSAGES_PER_STREAM = 4


def encoded(codec: FrameCodec[Any], values: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    return values.map(lambda value: codec.encode(value)[0])


def decode_public_request(data: bytes) -> None:
    public.decode_request(generation_pb2.GenerateRequest.FromString(data))


def decode_public_response(data: bytes) -> None:
    public.RESPONSE.decode(generation_pb2.GenerateResponse.FromString(data))


STEPS = encoded(talk.ASK_TARGET.outgoing, frames.step_frames)
COMMIT = encoded(talk.ASK_DRAFTER.outgoing, frames.commit_frames)
SUBMIT = encoded(talk.ASK_COORDINATOR.outgoing, frames.submit_frames)
VERDICT = encoded(talk.ANSWER_AS_TARGET.outgoing, frames.verdict_frames)
PROPOSAL = encoded(talk.ANSWER_AS_DRAFTER.outgoing, frames.proposal_frames)
EVENT = encoded(talk.ANSWER_AS_COORDINATOR.outgoing, frames.event_frames)
REQUEST = public_requests.map(lambda one: public.REQUEST.encode(one).SerializeToString())
RESPONSE = public_responses.map(lambda one: public.RESPONSE.encode(one).SerializeToString())
KINDS: dict[str, tuple[st.SearchStrategy[bytes], Callable[[bytes], Any]]] = {
    "steps": (STEPS, talk.ANSWER_AS_TARGET.incoming.decode),
    "verdict": (VERDICT, talk.ASK_TARGET.incoming.decode),
    "commit": (COMMIT, talk.ANSWER_AS_DRAFTER.incoming.decode),
    "proposal": (PROPOSAL, talk.ASK_DRAFTER.incoming.decode),
    "submit": (SUBMIT, talk.ANSWER_AS_COORDINATOR.incoming.decode),
    "event": (EVENT, talk.ASK_COORDINATOR.incoming.decode),
    "request": (REQUEST, decode_public_request),
    "response": (RESPONSE, decode_public_response),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_message_is_decoded_or_refused_and_nothing_else(kind: str) -> None:
    valid, decode = KINDS[kind]
    outcomes = {"decoded": 0, "refused": 0}

    @generating(max(20, NUM_MUTATIONS // 2 // len(KINDS)))
    @given(mutated(valid))
    def check(data: bytes) -> None:
        try:
            decode(data)
            outcomes["decoded"] += 1
        except (DrafthouseError, DecodeError):
            outcomes["refused"] += 1

    check()
    assert outcomes["refused"] > 0, outcomes
    # The damage is not everything: of a few messages, though, none may have stayed whole.
    assert outcomes["decoded"] > 0 or outcomes["refused"] < 200, outcomes


@dataclass(frozen=True)
class Kind:
    """A server with its peer, what damaged messages are made of, and a request that is answered."""

    serve: Callable[[], Any]
    connect: Callable[[str], Any]
    service: talk.Service
    valid: st.SearchStrategy[bytes]
    ask: Callable[[int], Any]


def commit(number: int) -> CommitFrame:
    ids = token_array([1, 2])
    return CommitFrame((Commit(f"r{number}", 1, 0, 0, ids, 2, 8, params=SamplingParams()),))


def submit(number: int) -> SubmitFrame:
    return SubmitFrame((Request(f"r{number}", token_array([5, 6]), SamplingParams()),))


SERVERS = {
    "target": Kind(
        lambda: serve_target(EchoTarget()),
        connect_target,
        talk.TARGET,
        STEPS,
        lambda number: step_frame(f"r{number}"),
    ),
    "drafter": Kind(
        lambda: serve_drafter(EchoDrafter()), connect_drafter, talk.DRAFTER, COMMIT, commit
    ),
    "coordinator": Kind(
        lambda: serve_coordinator(EchoCoordinator()),
        connect_coordinator,
        talk.COORDINATOR,
        SUBMIT,
        submit,
    ),
}


@pytest.mark.parametrize("name", SERVERS)
async def test_a_server_answers_others_while_damaged_messages_come(name: str) -> None:
    kind = SERVERS[name]
    messages = damaged(kind.valid, max(20, NUM_MUTATIONS // 2 // len(SERVERS)))
    async with stopping(await kind.serve()) as server:
        _, link = await kind.connect(server.address)
        answers = aiter(link)
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = channel.stream_stream(f"/{kind.service.name}/{kind.service.stream}")
            half = len(messages) // 2
            sizes = []
            tracemalloc.start()
            try:
                for part in (messages[:half], messages[half:]):
                    for start in range(0, len(part), MESSAGES_PER_STREAM):
                        await asyncio.wait_for(
                            send(call, part[start : start + MESSAGES_PER_STREAM]), PATIENCE_S
                        )
                        await link.send(kind.ask(start))
                        await asyncio.wait_for(anext(answers), PATIENCE_S)
                    gc.collect()
                    sizes.append(tracemalloc.get_traced_memory()[0])
            finally:
                tracemalloc.stop()
        await link.close()
    assert sizes[1] - sizes[0] < MAX_GROWTH_BYTES


async def send(start: Any, messages: Sequence[bytes]) -> None:
    """One stream with `messages`; what comes back is read until the server has had enough."""
    call = start()
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for message in messages:
            await call.write(message)
        await call.done_writing()
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    assert await call.code() is not grpc.StatusCode.UNKNOWN  # a handler that fell over
