"""Damaged messages: every decoder and every server refuses them, and goes on serving others.

DRAFTHOUSE_MUTATIONS says how many there are; a nightly run sets it to 10000.
"""

import asyncio
import gc
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import DrafthouseError
from cluster.rpc.trust import NO_TRUST, Trust
from tests.support.choices import IS_NIGHT, by_day
from tests.support.rpc.frames_strategy import FRAMES
from tests.support.rpc.mutations import (
    MAX_GROWTH_BYTES,
    NUM_MUTATIONS,
    damaged,
    generating,
    mutated,
)
from tests.support.rpc.servers import KINDS, PATIENCE_S, SECRET, answered, trusting

# A stream ends with the first message that is not a frame; those after it are not read.
MESSAGES_PER_STREAM = 4


def encoded(kind: str) -> st.SearchStrategy[bytes]:
    codec, values = FRAMES[kind]
    return values.map(lambda value: codec.encode(value)[0])


@pytest.mark.parametrize("kind", FRAMES)
def test_a_damaged_message_is_decoded_or_refused_and_nothing_else(kind: str):
    codec, _ = FRAMES[kind]
    outcomes = {"decoded": 0, "refused": 0}

    @generating(max(20, NUM_MUTATIONS // 2 // len(FRAMES)))
    @given(mutated(encoded(kind)))
    def check(data: bytes) -> None:
        try:
            codec.decode(data)
            outcomes["decoded"] += 1
        except (DrafthouseError, DecodeError):
            outcomes["refused"] += 1

    check()
    assert outcomes["refused"] > 0, outcomes
    # The damage is not everything: of a few messages, though, none may have stayed whole.
    assert outcomes["decoded"] > 0 or outcomes["refused"] < 200, outcomes


@pytest.mark.parametrize("trust", by_day([NO_TRUST], [NO_TRUST, trusting(SECRET)]))
@pytest.mark.parametrize(
    ("name", "asked"), [("target", "steps"), ("drafter", "commit"), ("coordinator", "submit")]
)
async def test_a_server_answers_others_while_damaged_messages_come(
    name: str, asked: str, trust: Trust
):
    kind = KINDS[name]
    messages = damaged(encoded(asked), max(20, NUM_MUTATIONS // 4 // len(KINDS)))
    async with kind.running(trust) as server, server.raw() as channel:
        link, method = await server.link(trust), server.method()
        call = channel.stream_stream(method)
        half = len(messages) // 2
        sizes = []
        if IS_NIGHT:  # of fewer messages it would tell nothing, and take most of the time
            tracemalloc.start()
        try:
            for part in (messages[:half], messages[half:]):
                for start in range(0, len(part), MESSAGES_PER_STREAM):
                    stream = call(metadata=server.token(trust, method))
                    some = part[start : start + MESSAGES_PER_STREAM]
                    await asyncio.wait_for(send(stream, some), PATIENCE_S)
                    await answered(kind, link, start)
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        await link.close()
    assert sizes[1] - sizes[0] < MAX_GROWTH_BYTES


async def send(call: Any, messages: Sequence[bytes]) -> None:
    """Send `messages` in a stream; what comes back is read until the server has had enough."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for message in messages:
            await call.write(message)
        await call.done_writing()
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    code = await call.code()
    # A handler that fell over, or a stream that was not let in.
    assert code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAUTHENTICATED)
