"""A public service that writes letters and breaks off where a test says."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from cluster.client import ChoiceDelta, FinishReason, GenerateRequest, GenerateResponse
from cluster.client.generated.generation_pb2_grpc import GenerationServiceServicer

NUM_TOKENS = 12
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Break:
    """The status that ends a stream."""

    status: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    details: str = "scripted"
    metadata: tuple[tuple[str, str], ...] = ()


def token_at(seed: int, choice: int, position: int) -> int:
    """A token as a function of seed, choice and position, like the real text."""
    return (seed * 31 + choice * 7 + position * position) % 26


def expected_text(seed: int, choice: int) -> str:
    return "".join(chr(97 + token_at(seed, choice, position)) for position in range(NUM_TOKENS))


@dataclass
class ScriptedService(GenerationServiceServicer):
    """Sends NUM_TOKENS letters per choice; breaks streams as scripted.

    breaks: per stream the number of responses before the break and what it is, None = the stream
    ends with OK; the streams after the script run to the end.
    drawn_seed: the seed of requests that send none; another for each.
    """

    breaks: list[tuple[int, Break | None]] = field(default_factory=list)
    requests: list[GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    drawn_seed: int = 77

    def Generate(self, request: GenerateRequest, context: Any) -> Iterator[GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        scripted = self.breaks.pop(0) if self.breaks else (-1, None)
        if request.sampling.HasField("seed"):
            seed = request.sampling.seed
        else:
            self.drawn_seed = seed = self.drawn_seed + 1
        have = {choice.index: len(choice.token_ids) for choice in request.resume}
        finished = {choice.index for choice in request.resume if choice.finished}
        num_sent = 0
        for position in range(NUM_TOKENS):
            for choice in range(request.n or 1):
                if choice in finished or position < have.get(choice, 0):
                    continue
                if num_sent == scripted[0]:
                    end(context, scripted[1])
                    return
                num_sent += 1
                yield letter(seed, choice, position)
        if num_sent == scripted[0]:
            end(context, scripted[1])
            return
        last = GenerateResponse(id="id", model="toy", seed=seed)
        last.usage.prompt_tokens = 5
        last.usage.completion_tokens = NUM_TOKENS * (request.n or 1)
        last.speculative_decoding.num_spec_steps = 3
        yield last


def letter(seed: int, choice: int, position: int) -> GenerateResponse:
    token = token_at(seed, choice, position)
    delta = ChoiceDelta(index=choice, text=chr(97 + token), token_ids=[token])
    delta.logprobs.logprobs.append(-float(position))
    if position == NUM_TOKENS - 1:
        delta.finish_reason = FinishReason.FINISH_REASON_LENGTH
    return GenerateResponse(id="id", model="toy", seed=seed, choices=[delta])


def end(context: Any, cause: Break | None) -> None:
    if cause is not None:
        context.set_trailing_metadata(cause.metadata)
        context.abort(cause.status, cause.details)


class EndlessService(GenerationServiceServicer):
    """Sends one letter and then waits for its client to go."""

    def __init__(self) -> None:
        self.client_gone = threading.Event()

    def Generate(self, _request: Any, context: Any) -> Iterator[GenerateResponse]:
        context.add_callback(self.client_gone.set)
        yield letter(1, 0, 0)
        self.client_gone.wait(PATIENCE_S)
