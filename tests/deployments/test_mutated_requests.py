"""Damaged requests of the public service: each ends, others are answered, nothing is kept.

DRAFTHOUSE_MUTATIONS says how many there are; see tests/rpc/test_mutated_frames.py.
"""

import gc
import tracemalloc
from collections import Counter
from pathlib import Path

import grpc
from hypothesis import strategies as st

from cluster.client import (
    ChatMessage,
    ChatMessages,
    Client,
    Endpoint,
    GenerateRequest,
    SamplingOptions,
    TokenIds,
)
from cluster.config.schema import Config
from tests.deployments.test_grpc_request import CALL
from tests.support.clock import wait_until
from tests.support.deployments.place import write_keys
from tests.support.deployments.scripted import scripted
from tests.support.rpc.mutations import MAX_GROWTH_BYTES, NUM_MUTATIONS, damaged
from tests.support.text.tokenizers_for_tests import byte_level_folder

PATIENCE_S = 20.0
METHOD = "/drafthouse.v1.GenerationService/Generate"
# A bug of ours, or a request that is stuck.
BROKEN = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
# Between two requests that must be answered.
NUM_BETWEEN = 10
CHAT = ChatMessages(messages=[ChatMessage(role="user", content="hi", name="me")])
VALID = st.sampled_from(
    [
        one.SerializeToString()
        for one in (
            CALL,
            GenerateRequest(chat=CHAT),
            GenerateRequest(tokens=TokenIds(token_ids=[1])),
        )
    ]
)
REQUEST = GenerateRequest(
    model="toy",
    tokens=TokenIds(token_ids=[1, 2, 3]),
    sampling=SamplingOptions(max_tokens=8, ignore_eos=True),
)


def named(data: bytes) -> bytes:
    """The same for the model that is served: later fields win, so the request gets further."""
    return data + GenerateRequest(model="toy").SerializeToString()


def test_the_ingress_answers_others_while_damaged_requests_come(tmp_path: Path):
    messages = damaged(VALID, max(40, NUM_MUTATIONS // 4))
    sizes = []
    outcomes = Counter()
    # Behind a key they get as far as without any.
    config = Config(model_name="toy", access=write_keys(tmp_path / "keys.yaml", mutant={}))
    shown = (("authorization", "Bearer mutant"),)
    with scripted(byte_level_folder(tmp_path), config) as server:
        address = f"127.0.0.1:{server.grpc_port}"
        endpoint = Endpoint(address, metadata=shown)
        with grpc.insecure_channel(address) as channel, Client(endpoint) as client:
            half = len(messages) // 2
            tracemalloc.start()
            try:
                for part in (messages[:half], messages[half:]):
                    for number, message in enumerate(part):
                        sent = named(message) if number % 2 else message
                        outcomes[send(channel, sent, shown)] += 1
                        if number % NUM_BETWEEN == 0:
                            answer = client.complete(REQUEST, timeout_s=PATIENCE_S)
                            assert answer.usage.completion_tokens == 8
                    gc.collect()
                    sizes.append(tracemalloc.get_traced_memory()[0])
            finally:
                tracemalloc.stop()
        wait_until(lambda: not server.num_running(), PATIENCE_S)
    assert outcomes["refused"] > 0
    assert set(outcomes) <= {"answered", "refused"}, outcomes
    assert sizes[1] - sizes[0] < MAX_GROWTH_BYTES


def send(channel: grpc.Channel, message: bytes, shown: tuple[tuple[str, str], ...]) -> str:
    """How the call ended; an answer that begins is enough.  shown: the call's metadata."""
    call = channel.unary_stream(METHOD)(message, timeout=PATIENCE_S, metadata=shown)
    try:
        for _ in call:
            call.cancel()
            return "answered"
    except grpc.RpcError:
        return "refused" if call.code() not in BROKEN else f"{call.code()}: {call.details()}"
    return "answered"
