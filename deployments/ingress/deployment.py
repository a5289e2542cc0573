"""The ingress as a Ray Serve deployment: HTTP and gRPC in front of the coordinators."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from ray import serve

from cluster.config.schema import Config, HttpConfig
from cluster.core import SamplingParams
from cluster.text.generation_config import load_sampling_defaults
from cluster.text.tokenizer import Tokenizer
from cluster.worker.priority import lower_priority
from deployments.configured_models import tokenizer_folder
from deployments.endpoints import running_replicas
from deployments.ingress.grpc_api import GrpcListener
from deployments.ingress.http import create_admin_app, create_app
from deployments.ingress.http_listener import HttpListener
from deployments.ingress.ingress import LAST_WORDS_S, Ingress
from deployments.replica import (
    Exporter,
    Replica,
    has_others,
    process_id,
)

# Whoever listens waits until every request is over (`Ingress.drain`), and so much longer.
_LISTENER_MARGIN_S = 2 * LAST_WORDS_S
# And whoever waits for the replica, so much longer than the grace.
DRAIN_MARGIN_S = 2 * _LISTENER_MARGIN_S


class IngressDeployment(Replica):
    """One ingress replica."""

    async def __init__(self, config: Config, coordinator: Any) -> None:  # type: ignore[misc]  # awaited
        """coordinator: a Serve handle, used only to find the coordinators' addresses."""
        lower_priority(config.ingress.nice)  # threads that start later inherit it
        self._begin(config, "ingress")
        tokenizer, defaults = await asyncio.to_thread(_load_text, config)
        self._part: Ingress = Ingress(
            config,
            tokenizer,
            defaults,
            running_replicas(coordinator),
            process=process_id("ingress"),
            others=self._ask_others,
            trust=self._trust,
        )
        self._part.start()
        self._ending.push_async_callback(self._part.stop)
        if await asyncio.to_thread(has_others):
            await self._part.connections.first_link()
        self._go_on(Exporter(self._part.recorder).run_forever())
        patience_s = config.ingress.shutdown_grace_s + _LISTENER_MARGIN_S
        app, tls = create_app(self._part), config.tls.pem()
        self._http = HttpListener(app, config.http, patience_s, tls)
        self._listeners: list[GrpcListener | HttpListener] = [
            GrpcListener(self._part, patience_s),
            self._http,
        ]
        admin = config.access.admin
        if admin.port is not None:
            where = HttpConfig(host=admin.host, port=admin.port)
            self._listeners.append(HttpListener(create_admin_app(self._part), where, patience_s))
        self._drained: asyncio.Task[None] | None = None
        self._ending.push_async_callback(self.drain)
        for listener in self._listeners:
            await listener.start()

    async def metrics_for(self, asking: str) -> bytes:
        """This replica's own series, in Prometheus' text format; b"" if it asks itself."""
        recorder = self._part.recorder
        return b"" if recorder.process == asking else recorder.render()

    async def _ask_others(self, timeout_s: float) -> list[bytes]:
        """The series of the other replicas of this deployment that answer in time."""
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, app_name=context.app_name)
        asking = handle.broadcast("metrics_for", self._part.recorder.process)
        answers: list[Any] = []
        with contextlib.suppress(TimeoutError):
            answers = await asking.results_async(timeout_s=timeout_s, return_exceptions=True)
        return [answer for answer in answers if answer and isinstance(answer, bytes)]

    async def health(self) -> dict[str, Any]:
        """Return what /health tells operators."""
        return await self._part.health()

    async def check_health(self) -> None:
        """Called by Serve; raises WorkerError where nobody would be answered."""
        if self._drained is None:
            self._http.check()

    async def drain(self) -> None:
        """Take no more requests, and return when all that run are over, at the latest after
        `ingress.shutdown_grace_s`.  Whoever ends the whole application calls it first, while the
        workers still run."""
        if self._drained is None:
            self._drained = asyncio.create_task(self._drain())
        await asyncio.shield(self._drained)

    async def _drain(self) -> None:
        stopping = (listener.stop() for listener in self._listeners)
        await asyncio.gather(self._part.drain(), *stopping, return_exceptions=True)


def _load_text(config: Config) -> tuple[Tokenizer, SamplingParams]:
    """The tokenizer of the target's model and its default sampling parameters."""
    target = config.target
    folder, choice = tokenizer_folder(target.engine.model), target.generation_config
    tokenizer = Tokenizer.load(
        folder,
        generation_config=choice,
        chat_template=config.answers.chat_template,
    )
    return tokenizer, load_sampling_defaults(folder, choice)
