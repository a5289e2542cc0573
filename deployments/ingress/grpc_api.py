"""Serves drafthouse.v1.GenerationService and grpc.health.v1, on a port of the ingress' own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from operator import methodcaller
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from cluster.client.generated import generation_pb2 as pb
from cluster.config.doors import joined
from cluster.core import SpeculationStats
from cluster.errors import (
    CapacityError,
    ConfigError,
    DrafthouseError,
    NotFoundError,
    RequestError,
    TooLargeError,
)
from cluster.logs import REQUEST_ID
from cluster.records import record
from cluster.rpc.codec import LOGPROBS, PARTS
from cluster.rpc.codec_records import ByHand, record_codec
from cluster.rpc.options import public_server_options
from cluster.rpc.status import abort, status_code, trailing_metadata
from cluster.rpc.trust import Trust, refusing
from deployments.ingress.body import hidden
from deployments.ingress.choice import Delta
from deployments.ingress.generation import Generation
from deployments.ingress.grpc_request import prompt_of, request_name, to_spec, tokens_of
from deployments.ingress.ingress import Ingress

GENERATION = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
STATS = record_codec(
    SpeculationStats,
    pb.SpeculativeDecoding,
    by_hand={
        # Clients are not told of the one, and the response itself says the other.
        "verified_by_drafter": ByHand(("prediction_idle_because",), None, lambda message: {})
    },
)
# Of what chats alone are told nothing is sent but the text.
_NOT_SENT = ByHand((), None, lambda message: None)
DELTA = record_codec(
    Delta,
    pb.ChoiceDelta,
    PARTS,
    by_hand=dict.fromkeys(("part", "has_calls", "is_cut"), _NOT_SENT),
)


@contextlib.asynccontextmanager
async def _told(context: Any) -> AsyncIterator[None]:
    """End the call with what is raised inside."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        await abort(context, hidden(error, "?"))


@record
class GrpcApi:
    """Answers calls; capitalised methods are gRPC's.  They get messages as bytes, so that what is
    malformed, too large or no UTF-8 is answered with a status of ours."""

    _ingress: Ingress

    async def Generate(self, body: bytes, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Yield one GenerateResponse per piece of text; the last one has the usage."""
        async with _told(context):
            sent = dict(context.invocation_metadata() or ())
            caller = self._ingress.caller(sent)
            with self._ingress.counting_refusals():
                message = self._read(pb.GenerateRequest, body)
                limits = self._ingress.limits(caller, sent)
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
                model = message.model or self._ingress.config.model_name
                async for deltas in generation.deltas():
                    yield _response(model, generation, deltas)
            finally:
                generation.close()

    async def ListModels(self, body: bytes, context: Any) -> pb.ListModelsResponse:
        async with _told(context):
            self._read(pb.ListModelsRequest, body)
            limits, own = self._ingress.limits(), self._ingress.config.model_name
            most = self._ingress.coordinators.max_context_len
            return pb.ListModelsResponse(
                models=(
                    pb.Model(
                        id=name,
                        root=own,
                        parent=own if name in limits.adapters else "",
                        max_context_len=most,
                    )
                    for name in limits.model_names
                )
            )

    async def Tokenize(self, body: bytes, context: Any) -> pb.TokenizeResponse:
        async with _told(context):
            message = self._read(pb.TokenizeRequest, body)
            self._check_named(message.model)
            adds = message.add_special_tokens if message.HasField("add_special_tokens") else True
            prompt = prompt_of(message, self._ingress.limits())
            token_ids = await self._ingress.tokenize(prompt, add_special_tokens=adds)
            return pb.TokenizeResponse(
                token_ids=token_ids.tolist(),
                max_context_len=self._ingress.coordinators.max_context_len,
            )

    async def Detokenize(self, body: bytes, context: Any) -> pb.DetokenizeResponse:
        async with _told(context):
            message = self._read(pb.DetokenizeRequest, body)
            self._check_named(message.model)
            token_ids = tokens_of(message.token_ids, "token_ids", self._ingress.limits())
            return pb.DetokenizeResponse(text=await self._ingress.detokenize(token_ids))

    def _read(self, kind: Any, body: bytes) -> Any:
        """The message of a body; raises RequestError for what is none."""
        limit = self._ingress.config.ingress.max_body_bytes
        if len(body) > limit:
            raise TooLargeError(
                f"the request has {len(body)} bytes, the limit is {limit}; shorten it or raise "
                "ingress.max_body_bytes"
            )
        try:
            return kind.FromString(body)
        except DecodeError:
            raise RequestError(
                f"the request is not a valid {kind.DESCRIPTOR.name}; check the encoding and that "
                "all text is UTF-8"
            ) from None

    def _check_named(self, model: str) -> None:
        if model:
            self._ingress.limits().check_model(model)

    async def Check(self, body: bytes, context: Any) -> Any:
        """grpc.health.v1.Health/Check."""
        async with _told(context):
            told = self._health(body)
            if told.status == told.SERVICE_UNKNOWN:
                raise NotFoundError("no such service; ask for an empty name")
            return told

    async def Watch(self, body: bytes, context: Any) -> AsyncIterator[Any]:
        """grpc.health.v1.Health/Watch: the current status, then every change."""
        last = None
        async for _ in self._ingress.coordinators.changes():
            told = self._health(body)
            if told != last:
                yield told
                last = told

    def _health(self, body: bytes) -> Any:
        """Of the service that the body names."""
        told = health_pb2.HealthCheckResponse(status="NOT_SERVING")
        try:
            service = health_pb2.HealthCheckRequest.FromString(body).service
        except DecodeError:
            service = "?"  # not the name of a service
        if service not in ("", GENERATION):
            told.status = told.SERVICE_UNKNOWN
        elif self._ingress.coordinators.links and not self._ingress.coordinators.is_stopping:
            told.status = told.SERVING
        return told


def _response(model: str, generation: Generation, deltas: Sequence[Delta]) -> pb.GenerateResponse:
    end: dict[str, Any] = {}
    if generation.is_over:
        stats, prompt = generation.stats, generation.prompts[0]
        told = STATS.encode(stats)
        told.MergeFrom(pb.SpeculativeDecoding(**generation.spec.prediction_idle()))
        usage = pb.Usage(
            prompt_tokens=generation.num_prompt_tokens,
            completion_tokens=generation.num_output_tokens,
            cached_tokens=generation.num_cached_tokens,
            **generation.spec.prediction_counts(stats),
        )
        of_prompt = LOGPROBS.encode(tuple(prompt.scored))
        end = {"usage": usage, "speculative_decoding": told, "prompt_logprobs": of_prompt}
    return pb.GenerateResponse(
        id=generation.id,
        model=model,
        seed=generation.prompts[0].seed,
        choices=map(DELTA.encode, deltas),
        **end,
    )


# All replicas on a node share the port, and the kernel distributes connections over them.

# What gRPC can count.
_MOST_MESSAGE_BYTES = 2**31 - 1


class GrpcListener:
    """A server that listens from `start` to `stop`."""

    def __init__(self, ingress: Ingress, patience_s: float) -> None:
        """patience_s: how long `stop` waits for calls that are under way.  Raises ConfigError for
        files of `tls` that cannot be used."""
        api, config = GrpcApi(ingress), ingress.config
        self._patience_s = patience_s
        self._where = config.grpc
        self._trust = Trust(pem=config.tls.pem())
        # Longer messages are read than are served, so that the refusal is ours.
        max_bytes = min(2 * config.ingress.max_body_bytes, _MOST_MESSAGE_BYTES)
        self._server = grpc.aio.server(
            options=public_server_options(max_bytes, config.max_calls),
            maximum_concurrent_rpcs=config.max_calls,
            interceptors=[_Door(ingress)],
        )
        _add(api, self._server, GENERATION, "Generate", "ListModels", "Tokenize", "Detokenize")
        _add(api, self._server, health.SERVICE_NAME, "Watch", "Check")
        reflection.enable_server_reflection(
            (GENERATION, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> None:
        """Start listening; raises ConfigError if the address cannot be bound."""
        where = joined(self._where.host, self._where.port)
        try:
            self._trust.listen(self._server, where)
        except RuntimeError as error:
            raise ConfigError.at(
                "grpc",
                f"{where} cannot be bound on this node; choose another host or port",
            ) from error
        await self._server.start()

    async def stop(self) -> None:
        """Refuse new calls, give open ones time to end, then break them."""
        await self._server.stop(self._patience_s)


class _Door(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Asks for a key before a message is read: one that never comes must hold no place.

    Health checks and reflection ask nobody, so where there are keys half of the places are for the
    calls that show one."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress
        self._strangers: set[asyncio.Task[Any]] = set()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        call, ingress = handler_call_details, self._ingress
        try:
            if call.method.startswith(f"/{GENERATION}/"):
                ingress.caller(dict(call.invocation_metadata or ()))
            elif not ingress.keys.is_open:
                self._count()
        except DrafthouseError as error:
            return refusing(status_code(error), error.message, trailing_metadata(error))
        return await continuation(call)

    def _count(self) -> None:
        """Count a call without a key until it ends; raises CapacityError for one too many."""
        most, call = self._ingress.config.max_calls // 2, asyncio.current_task()
        if len(self._strangers) >= most:
            raise CapacityError(f"{most} calls for health and reflection are open; end some first")
        assert call is not None  # gRPC runs each in one
        self._strangers.add(call)
        call.add_done_callback(self._strangers.discard)


def _add(servicer: Any, server: Any, service: str, stream: str, *calls: str) -> None:
    """stream: the method with many answers.  calls: those with one."""
    handlers = {
        name: make(getattr(servicer, name), response_serializer=methodcaller("SerializeToString"))
        for name, make in (
            (stream, grpc.unary_stream_rpc_method_handler),
            *((name, grpc.unary_unary_rpc_method_handler) for name in calls),
        )
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
