"""The part of the ingress that HTTP and gRPC share: tokenizer, coordinators and limits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from cluster import metrics
from cluster.config.schema import Config
from cluster.core import SamplingParams, TokenArray
from cluster.errors import DrafthouseError, UnavailableError
from cluster.metrics.recorder import INGRESS, Recorder, Told, ToldRequest
from cluster.rpc.channel import CoordinatorLink, connect_coordinator
from cluster.rpc.connections import Connections, Endpoint, Endpoints
from cluster.rpc.messages import WorkerDescription
from cluster.rpc.trust import NO_TRUST, Trust
from cluster.text.dialect import dialect_of
from cluster.text.prompt import Prompt
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.coordinators import Coordinators, answers_of
from deployments.ingress.event_stream import Watchers
from deployments.ingress.generation import Generation
from deployments.ingress.keys import ANYBODY, Caller, KeyRing, Quotas
from deployments.ingress.metrics_page import AskOthers, metrics_page, nobody, stats_of
from deployments.ingress.prompts import GrammarCheck, encode_all
from deployments.ingress.spec import GenerationSpec, Limits, ResponseStore
from deployments.ingress.tracing import follow, provider_of, write_line
from deployments.ingress.wording import Names

log = logging.getLogger(__name__)

_REPORT_TIMEOUT_S = 2.0
# The last events of streams that were ended are sent within this time, or not at all.
LAST_WORDS_S = 3.0
# The header, or metadata, that names a segment.
SEGMENT = "x-drafthouse-segment"


class Ingress:
    """Serves requests from HTTP and gRPC.  Create it on the event loop that serves them."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        defaults: SamplingParams,
        endpoints: Endpoints,
        *,
        process: str = "",
        others: AskOthers = nobody,
        trust: Trust = NO_TRUST,
    ) -> None:
        """defaults: sampling defaults of requests.  endpoints: the coordinators.  process: the name
        of this process in metrics.  others: asks the other replicas of the ingress for their
        metrics.  trust: shown to the coordinators."""
        self.config = config
        self._trust = trust
        self.tokenizer = tokenizer
        self.recorder = Recorder(process, INGRESS, model_name=config.model_name)
        self._told = Told(self.recorder)
        self._others = others
        self.keys = KeyRing(config)
        self._quotas = Quotas(self.keys, self.recorder)
        self.coordinators = Coordinators(config.coordinator)
        # Until a coordinator says what the targets serve.
        self.coordinators.adapters = {name: name for name in config.target.engine.adapters}
        self._running: set[Generation] = set()
        self.watchers = Watchers(self.coordinators)
        self.tracing = provider_of(config.ingress.traces_url)
        self._grammars = GrammarCheck(tokenizer, config.answers)
        self._limits = Limits(
            config,
            tokenizer.vocab_size,
            dialect=dialect_of(
                tokenizer, config.answers.tool_parser, config.answers.reasoning_parser
            ),
            defaults=defaults,
            store=ResponseStore(config.api.max_stored_responses, config.api.max_stored_bytes),
        )
        self._refused = ""
        self.connections: Connections[CoordinatorLink] = Connections(
            "coordinator", endpoints, self._connect, self.coordinators.use
        )

    async def use(self, config: Config) -> None:
        """Go on with other values of the keys that may change while it serves: see
        `cluster.config.live`.  Requests that are running keep what they were admitted with.

        Raises ConfigError where the clients' keys do not fit; then nothing has changed."""
        await self.keys.use(config)
        self.config, self._refused = config, ""
        self._limits = dataclasses.replace(self._limits, config=config)

    def refuse_config(self, reason: str) -> None:
        """Report that a change of the configuration was refused, until one is not."""
        self._refused = reason

    def limits(self, caller: Caller = ANYBODY, headers: Mapping[str, str] = {}) -> Limits:
        """Return the limits of a key's request with these headers, or metadata.

        With the adapters that are served now: they may change at any time."""
        return dataclasses.replace(
            self._limits,
            adapters=self.coordinators.adapters,
            caller=caller,
            segment=headers.get(SEGMENT, ""),
        )

    def start(self) -> None:
        """Start connecting to the coordinators, and watching the file of keys."""
        self.connections.start()
        self._watching = asyncio.create_task(self.keys.watch(), name="watch the keys")

    async def drain(self) -> None:
        """Take no more requests, and return when none runs: after `ingress.shutdown_grace_s` those
        that are left end with an error.  Nobody else could continue their streams: their clients
        are connected to this process."""
        self.coordinators.begin_stopping()
        grace_s = self.config.ingress.shutdown_grace_s
        await self._closed_within(grace_s)
        if not self._running:
            return
        log.warning("stopping: %d requests are not over after %g s", len(self._running), grace_s)
        for generation in self._running:
            generation.fail(
                UnavailableError(
                    f"the server is stopping, and the answer was not over {grace_s:g} s after it "
                    "was told to; send the request again"
                )
            )
        await self._closed_within(LAST_WORDS_S)

    async def _closed_within(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                for generation in tuple(self._running):
                    await generation.closed.wait()

    async def stop(self) -> None:
        """Close the streams; running requests end with an error."""
        await self.connections.stop()
        self._grammars.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.shutdown)  # sends what there still is
        self._watching.cancel()

    async def _connect(self, endpoint: Endpoint) -> tuple[WorkerDescription, CoordinatorLink]:
        description, link = await connect_coordinator(
            endpoint.address,
            worker_id=endpoint.worker_id,
            tokenizer_hash=self.tokenizer.hash,
            max_frame_bytes=self.config.coordinator.max_frame_bytes,
            trust=self._trust,
        )
        if description.vocab_size == 0:
            # A coordinator knows its limits only once it leads a target; before, it cannot serve.
            await link.close()
            raise UnavailableError(f"coordinator {description.worker_id} has no target yet")
        return description, link

    async def generate(
        self,
        request_id: str,
        spec: GenerationSpec,
        timeout_s: float | None = None,
        caller: Caller = ANYBODY,
        traceparent: str = "",
    ) -> Generation:
        """Start a generation, which must be closed; raises if it is refused.

        timeout_s: at most `api.max_request_timeout_s`.  traceparent: the client's, as of W3C."""
        limit_s = self.config.api.max_request_timeout_s
        if limit_s and (timeout_s is None or timeout_s > limit_s):
            timeout_s = limit_s
        # A key may send any number of salts.
        asker = caller.name.encode() or spec.tenant
        use = self._quotas.enter(caller, spec.speculation.latency_class)
        generation = Generation(
            request_id,
            spec,
            self.tokenizer,
            self.coordinators,
            self.config.ingress.max_chars_per_token,
            timeout_s=timeout_s,
            dialect=self._limits.dialect,
            use=use,
        )
        if self.tracing is not None:
            follow(self.tracing, generation, traceparent, self.config.model_name)
        if self.config.ingress.log_requests:
            generation.when_closed.append(write_line)

        async def begin() -> None:
            await self._grammars.check(spec.params.grammar, asker)
            await generation.start()

        self._running.add(generation)
        generation.when_closed.append(self._running.discard)
        try:
            if self.coordinators.is_stopping:
                raise UnavailableError("the server is stopping; send the request again in a moment")
            with generation.noted():
                await generation.unless_failed(begin())
            generation.told = ToldRequest(self._told, spec.task, spec.segment)
        except BaseException:
            generation.close()
            raise
        return generation

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> TokenArray:
        """The tokens of a prompt; raises RequestError for one that no context can hold."""
        with Names(prompt.names).told():
            (token_ids,) = await encode_all(
                [prompt],
                self.tokenizer,
                self.coordinators.max_context_len,
                self.config.ingress.max_chars_per_token,
                add_special_tokens=add_special_tokens,
            )
        return token_ids

    async def detokenize(self, token_ids: TokenArray) -> str:
        """The text of tokens, special ones included."""
        # A message of some megabytes holds many tokens.
        return await asyncio.to_thread(self.tokenizer.decode, token_ids, skip_special_tokens=False)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Return who calls, by the headers or the metadata; a refusal is counted."""
        with self.counting_refusals():
            return self.keys.caller(headers)

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count a request that the ingress itself refuses inside."""
        try:
            yield
        except DrafthouseError as error:
            self.recorder.add(metrics.REJECTED, code=error.code)
            raise

    async def health(self) -> dict[str, Any]:
        """The current health; `status` is "ok" if a coordinator leads a target.

        drafters: connected replicas by name.  refused: why a drafter takes no part, by name.
        faults: of drafters since their coordinators started, by name and reason.  left_alone: those
        that are asked for nothing for a while, after faults in a row.
        engines: what each engine computes with, and what of it is slower than was wanted.
        rollouts: of drafters that may replace others, at each target or coordinator that decides.
        keys: names of the callers, and why the file of keys as it is now is not used.
        """
        links = self.coordinators.links
        reports = await answers_of(links, lambda link: link.status(_REPORT_TIMEOUT_S))
        refused = {"ingress.user_config": self._refused} if self._refused else {}
        drafters, faults = Counter[str](), defaultdict[str, Counter[str]](Counter)
        for report in reports:
            drafters |= Counter(drafter["name"] for drafter in report["drafters"])
            refused |= report["refused"]
            for name, counts in report["faults"].items():
                faults[name].update(counts)
        # Every coordinator tells of the same targets and drafters: each counts once.
        targets = {target["id"] for report in reports for target in report["targets"]}
        engines = {
            (each["worker"], each["name"]): each for report in reports for each in report["engines"]
        }
        rollouts = {
            (place["id"], each["drafter"]): {"at": place["id"], **each}
            for report in reports
            for place in (report, *report["targets"])
            for each in place.get("rollouts", ())
        }
        status = "ok" if targets else "unavailable"
        return {
            "status": "stopping" if self.coordinators.is_stopping else status,
            "model": self.config.model_name,
            "coordinators": len(reports),
            "targets": len(targets),
            "drafters": dict.fromkeys(self.config.on_their_own, 0) | drafters,
            "refused": refused,
            "faults": faults,
            "left_alone": sorted({name for report in reports for name in report["left_alone"]}),
            "engines": list(engines.values()),
            "rollouts": list(rollouts.values()),
            **self.keys.status(),
        }

    async def render_metrics(self) -> bytes:
        """The series of every ingress replica and coordinator, in Prometheus' text format."""
        num_others = self.config.ingress.replicas - 1
        others = self._others if num_others else nobody
        return await metrics_page(self.recorder, self.coordinators.links, others, num_others)

    async def stats(self) -> dict[str, Any]:
        """The same as a few totals."""
        page = await self.render_metrics()
        return await asyncio.to_thread(stats_of, page, self.config.model_name)
