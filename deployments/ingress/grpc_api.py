"""Serves drafthouse.v1.GenerationService and grpc.health.v1."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from cluster.client.generated import generation_pb2 as pb
from cluster.core import SpeculationStats
from cluster.errors import DrafthouseError, NotFoundError, RequestError, TooLargeError
from cluster.logs import REQUEST_ID
from cluster.rpc.codec import LOGPROBS, PARTS
from cluster.rpc.codec_records import ByHand, record_codec
from cluster.rpc.status import abort
from deployments.ingress.body import hidden
from deployments.ingress.choice import Delta
from deployments.ingress.generation import Generation
from deployments.ingress.grpc_request import prompt_of, request_name, to_spec, tokens_of
from deployments.ingress.ingress import Ingress
from deployments.ingress.keys import Caller
from deployments.ingress.prompts import prediction_counts, prediction_idle
from deployments.ingress.request_scope import SEGMENT
from deployments.ingress.sampling import check_model

GENERATION = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
STATS = record_codec(
    SpeculationStats,
    pb.SpeculativeDecoding,
    by_hand={
        # Clients are not told of the one, and the response itself says the other.
        "verified_by_drafter": ByHand(("prediction_idle_because",), None, lambda message: {})
    },
)
# Of what chats alone are told nothing is sent.
_NOT_SENT = ByHand((), None, lambda message: None)
DELTA = record_codec(
    Delta,
    pb.ChoiceDelta,
    PARTS,
    by_hand=dict.fromkeys(("kind", "call", "has_calls", "is_cut"), _NOT_SENT),
)


def _answering(kind: Any) -> Callable[[Callable[[Any, Any], Awaitable[Any]]], Any]:
    """Make a call with one answer of what answers its message, which is of that kind."""

    def call(answer: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        async def called(self: GrpcApi, request: Any, grpc_context: Any) -> Any:
            try:
                return await answer(self, _message_of(kind, request, self._ingress))
            except Exception as error:  # noqa: BLE001
                return await _end(grpc_context, error)

        return called

    return call


class GrpcApi:
    """Answers calls; capitalised methods are gRPC's.  They get messages as bytes, so that what is
    malformed, too large or no UTF-8 is answered with a status of ours."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress

    async def Generate(self, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        """Yield one GenerateResponse per piece of text; the last one has the usage."""
        try:
            async for response in self._responses(request, grpc_context):
                yield response
        except Exception as error:  # noqa: BLE001
            await _end(grpc_context, error)

    async def _responses(self, body: bytes, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        sent = dict(context.invocation_metadata() or ())
        caller = self._ingress.caller(sent)
        with self._ingress.counting_refusals():
            message = _message_of(pb.GenerateRequest, body, self._ingress)
            limits = self._ingress.limits_of(caller, sent.get(SEGMENT.lower(), ""))
            spec = to_spec(message, limits)
            request_id = request_name(message.request_id)
            REQUEST_ID.set(request_id)
            generation = await self._ingress.generate(
                request_id,
                spec,
                context.time_remaining(),
                caller,
                sent.get("traceparent", ""),
            )
        try:
            is_over, model = False, message.model or self._ingress.config.model_name
            async for deltas in generation.deltas():
                is_over = generation.is_over
                yield _response(model, generation, deltas, is_last=is_over)
            if not is_over:  # every choice was resumed as finished: only the usage is left to send
                yield _response(model, generation, (), is_last=True)
        finally:
            generation.close()

    @_answering(pb.ListModelsRequest)
    async def ListModels(self, message: pb.ListModelsRequest) -> pb.ListModelsResponse:
        limits, own = self._ingress.limits, self._ingress.config.model_name
        most = self._ingress.coordinators.max_context_len
        models = [
            pb.Model(
                id=name,
                root=own,
                parent=own if name in limits.adapters else "",
                max_context_len=most,
            )
            for name in limits.model_names
        ]
        return pb.ListModelsResponse(models=models)

    @_answering(pb.TokenizeRequest)
    async def Tokenize(self, message: pb.TokenizeRequest) -> pb.TokenizeResponse:
        self._check_named(message.model)
        adds = message.add_special_tokens if message.HasField("add_special_tokens") else True
        prompt = prompt_of(message, self._ingress.limits)
        token_ids = await self._ingress.tokenize(prompt, add_special_tokens=adds)
        return pb.TokenizeResponse(
            token_ids=token_ids.tolist(),
            max_context_len=self._ingress.coordinators.max_context_len,
        )

    @_answering(pb.DetokenizeRequest)
    async def Detokenize(self, message: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        self._check_named(message.model)
        token_ids = tokens_of(message.token_ids, "token_ids", self._ingress.limits)
        return pb.DetokenizeResponse(text=await self._ingress.detokenize(token_ids))

    def _check_named(self, model: str) -> None:
        if model:
            check_model(model, self._ingress.limits)

    def caller(self, metadata: Any) -> Caller:
        """Return who calls; a refusal is counted."""
        return self._ingress.caller(dict(metadata or ()))

    async def Check(self, request: Any, grpc_context: Any) -> Any:
        """grpc.health.v1.Health/Check."""
        status = self._status(_service_of(request))
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            error = NotFoundError("no such service; ask for an empty name")
            return await _end(grpc_context, error)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        """grpc.health.v1.Health/Watch: the current status, then every change."""
        service = _service_of(request)
        last: int | None = None
        is_over = False
        while not is_over:
            # Created before the status is read, so that no change during the yield is missed.
            changed = self._ingress.coordinators.next_change()
            is_over = self._ingress.is_stopping
            status = self._status(service)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            if not is_over:
                await changed.wait()

    def _status(self, service: str) -> int:
        values = health_pb2.HealthCheckResponse
        if service not in ("", GENERATION):
            return int(values.SERVICE_UNKNOWN)
        serving = self._ingress.coordinators.is_connected and not self._ingress.is_stopping
        return int(values.SERVING if serving else values.NOT_SERVING)


def _message_of(kind: Any, body: bytes, ingress: Ingress) -> Any:
    """The message of a body; raises RequestError for what is none."""
    limit = ingress.config.ingress.max_body_bytes
    if len(body) > limit:
        raise TooLargeError(
            f"the request has {len(body)} bytes, the limit is {limit}; shorten it or raise "
            "ingress.max_body_bytes"
        )
    try:
        return kind.FromString(body)
    except DecodeError:
        raise RequestError(
            f"the request is not a valid {kind.DESCRIPTOR.name}; check the encoding and that all "
            "text is UTF-8"
        ) from None


def _service_of(body: bytes) -> str:
    try:
        return str(health_pb2.HealthCheckRequest.FromString(body).service)
    except DecodeError:
        return "?"  # not the name of a service


async def _end(context: Any, error: Exception) -> NoReturn:
    """End a call with an error."""
    await abort(context, error if isinstance(error, DrafthouseError) else hidden(error, "?"))


def _response(
    model: str, generation: Generation, deltas: Sequence[Delta], *, is_last: bool = False
) -> pb.GenerateResponse:
    last: dict[str, Any] = {}
    if is_last:
        stats, scored = generation.stats, generation.prompt_logprobs(0)
        told = STATS.encode(stats)
        told.MergeFrom(pb.SpeculativeDecoding(**prediction_idle(generation.spec)))
        usage = pb.Usage(
            prompt_tokens=generation.num_prompt_tokens,
            completion_tokens=generation.num_output_tokens,
            cached_tokens=generation.num_cached_tokens,
            **prediction_counts(generation.spec, stats),
        )
        of_prompt = LOGPROBS.encode(tuple(one for one in scored if one is not None))
        last = {"usage": usage, "speculative_decoding": told, "prompt_logprobs": of_prompt}
    return pb.GenerateResponse(
        id=generation.id,
        model=model,
        seed=generation.seed_of(0),  # one prompt, so one seed
        choices=map(DELTA.encode, deltas),
        **last,
    )
