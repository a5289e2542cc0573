"""A whole cluster in one process, without Ray: `LLM(model, draft=...).generate(prompts)`.

    with LLM("smollm2-135m-instruct", draft="suffix") as llm:
        for completion in llm.generate(["def fib(n):"], SamplingParams(temperature=0.0)):
            print(completion.text)

The same classes that a cluster runs are connected by links in memory.  It works in notebooks too,
because everything runs on separate threads: the caller's own event loop is not touched.  torch's
thread settings are not changed either, because they belong to the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack, cast

import numpy as np

from cluster import by_name
from cluster.config.schema import Config
from cluster.coordinator.coordinator import Coordinator
from cluster.core import FinishReason, Request, SamplingParams, SpeculationOptions, token_array
from cluster.errors import ConfigError, RequestError, WorkerError, error_from_code
from cluster.models.resolve import resolve
from cluster.requests.fields import asked_seed, draw_seed, tenant_of
from cluster.rpc.link import Link, end_tasks, memory_pair
from cluster.text.chat import read_template
from cluster.text.completion import Completion, PendingCompletion, TextStream, beam_event
from cluster.text.generation_config import load_sampling_defaults
from cluster.text.tokenizer import Tokenizer
from cluster.worker.build import build_drafter, build_target

log = logging.getLogger(__name__)

T = TypeVar("T")

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
# For all prompts, or one for each.
Params = SamplingParams | Sequence[SamplingParams]
Messages = Sequence[Mapping[str, Any]]


class Options(TypedDict, total=False):
    """What all prompts of a call share.

    stop: strings that end a text and are not part of it.  ignore_eos: treat end-of-sequence tokens
    as ordinary text.  cache_salt: requests with different salts share no prefix cache and no
    learned text.  adapter: name of one in `target.engine.adapters`, "" = none.
    """

    task: str
    cache_salt: str | None
    adapter: str
    speculation: SpeculationOptions | None
    stop: Sequence[str]
    ignore_eos: bool


class LLM:
    """Loads a target with its drafters; use it as a context manager, or call `close`.

    default_params: the checkpoint's sampling defaults (`target.generation_config`); derive your own
    parameters from them.
    """

    def __init__(
        self,
        model: Config | str | Path,
        *,
        draft: str | Sequence[str] = (),
        settings: Sequence[str] = (),
    ) -> None:
        """model: a model as `target.engine.model` has it; or a Config, or a Serve config file, both
        of which name their drafters.  draft: what drafts for a model, as `drafthouse serve --draft`
        has it.  settings: overrides, such as `target.engine.dtype=float32`."""
        from cluster.worker.target_parts import load_target_engine

        drafts = [draft] if isinstance(draft, str) else draft
        if isinstance(model, Config):
            if drafts or settings:
                raise ConfigError("draft and settings are for a model's name; a Config has its own")
            self.config = model
        else:
            self.config = by_name.read(model, drafts, settings).config
        target = self.config.target
        engine = load_target_engine(self.config)
        folder = resolve(target.engine.model)
        template = self.config.answers.chat_template
        self.tokenizer = _tokenizer(folder, target.generation_config, template)
        params = load_sampling_defaults(folder, target.generation_config)
        max_tokens = params.max_tokens or SamplingParams().max_tokens
        self.default_params = dataclasses.replace(params, max_tokens=max_tokens)
        own = self.tokenizer.eos_token_ids if self.tokenizer else ()
        self._stop_ids = {*engine.eos_token_ids, *own}
        # Requests beyond the limit wait here, so that admission control refuses none of them.
        self._places = asyncio.Semaphore(self.config.coordinator.max_running_sequences)
        self._drafters = {name: build_drafter(self.config, name) for name in self.config.pool}
        self._target = build_target(engine, self.config)
        self._serving: list[asyncio.Task[None]] = []  # which the loop alone would not keep
        # The caller's thread keeps its own loop: with a factory, this one is not made its current.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run_loop, name="drafthouse", daemon=True)
        self._thread.start()
        self._coordinator, self._leading = self._run(self._start)

    def generate(
        self, prompts: Prompts, params: Params | None = None, **options: Unpack[Options]
    ) -> list[Completion]:
        """Continue every prompt; returns the results in the order of the prompts.

        prompts: one prompt or several, each a text or token ids.  params: one for all prompts or
        one each, None = `default_params`.  Without a seed, or with a negative one, every prompt
        draws its own.  With a shared seed, prompt i uses stream params.stream + i.
        Where params.beams asks for a beam search, the best text of each (`beam_search` has all).
        Raises the error of the first request that fails.
        """
        return [completions[0] for completions in self._generate(prompts, params, **options)]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params | None = None,
        **options: Unpack[Options],
    ) -> list[Completion]:
        """Answer one conversation, or several, in OpenAI's format; the rest as in `generate`."""
        read = self._needed("messages").apply_chat_template
        is_one = messages and isinstance(messages[0], Mapping)
        several: Sequence[Any] = [messages] if is_one else messages
        prompts = [read(each).tolist() for each in several]
        return self.generate(prompts, params, **options)

    def beam_search(
        self, prompts: Prompts, params: SamplingParams, **options: Unpack[Options]
    ) -> list[list[Completion]]:
        """For every prompt the best texts that params.beams finds, the best first.

        The rest as in `generate`."""
        if params.beams is None:
            raise RequestError("params.beams is None; say how to search", param="beams")
        options.setdefault("speculation", SpeculationOptions(enabled=False))
        return self._generate(prompts, params, **options)

    def _generate(
        self,
        prompts: Prompts,
        params: Params | None,
        *,
        task: str = "default",
        cache_salt: str | None = None,
        adapter: str = "",
        speculation: SpeculationOptions | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> list[list[Completion]]:
        asked = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            one = params or self.default_params
            # Each prompt has a noise stream of its own.
            streams = range(one.stream, one.stream + len(asked))
            params = [dataclasses.replace(one, stream=stream) for stream in streams]
        if len(params) != len(asked):
            raise RequestError(
                f"{len(params)} sampling parameters for {len(asked)} prompts; give one or one each",
                param="params",
            )
        requests = [
            Request(
                uuid.uuid4().hex[:16],
                self._needed("prompt").encode(prompt)
                if isinstance(prompt, str)
                else token_array(prompt),
                _drawn(each, () if ignore_eos else self._stop_ids),
                task,
                speculation or SpeculationOptions(),
                tenant=tenant_of(cache_salt),
                adapter=adapter,
                counts_steps=bool(stop),
            )
            for prompt, each in zip(asked, params, strict=True)
        ]
        return self._run(self._complete_all, requests, tuple(stop))

    def _needed(self, param: str) -> Tokenizer:
        """The tokenizer; raises RequestError where the model has none."""
        if self.tokenizer is None:
            raise RequestError(
                "the model's folder has no tokenizer; give prompts as token ids, and no stop "
                "strings",
                param=param,
            )
        return self.tokenizer

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Go on with other values of the target's keys that may change while it serves, as its
        `user_config` in docs/configuration.md has them: say, another model of a drafter inside it.

        Raises ConfigError for what cannot be; then nothing has changed."""
        change = self._target.reconfigure
        if refused := self._run(asyncio.to_thread, change, self.config, user_config):
            raise ConfigError(refused)

    def metrics(self) -> str:
        """All current metrics but what an ingress counts, in Prometheus' text format."""
        return self._run(_called, self._coordinator.render_metrics).decode()

    def status(self) -> dict[str, Any]:
        """The coordinator's current state."""
        return self._run(_called, self._coordinator.status)

    def close(self) -> None:
        """Stop every thread; idempotent."""
        if self._loop.is_closed():
            return
        self._run(self._coordinator.stop)
        self._target.stop()
        for drafter in self._drafters.values():
            drafter.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_loop(self) -> None:
        with self._runner:  # which cancels what is left, and closes the loop
            self._loop.run_forever()

    def _run(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        """Call it on the event loop and wait for the result; an interrupt cancels it."""
        if self._loop.is_closed():
            raise WorkerError("this LLM is closed; create a new one")
        future = asyncio.run_coroutine_threadsafe(work(*arguments), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _start(self) -> tuple[Coordinator, asyncio.Future[Any]]:
        """Returns the coordinator and the task that runs while it leads the target."""
        coordinator = Coordinator(self.config)
        await coordinator.start()
        target = self._target
        leading = coordinator.add_target("target", target.describe(), self._started(target))
        for name, drafter in self._drafters.items():
            coordinator.add_drafter(name, name, drafter.describe(), self._started(drafter))
        return coordinator, leading

    def _started(self, worker: Any) -> Link[Any, Any]:
        """Start a worker that serves the other end of the link."""
        worker.start()
        here, there = memory_pair()
        self._serving.append(self._loop.create_task(_served(worker, there)))
        return here

    async def _complete_all(
        self, requests: Sequence[Request], stop: tuple[str, ...]
    ) -> list[list[Completion]]:
        tasks = [asyncio.create_task(self._complete(request, stop)) for request in requests]
        answered = asyncio.gather(*tasks)
        try:
            await asyncio.wait([answered, self._leading], return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise WorkerError("the target has failed, its log says why; create a new LLM")
            return answered.result()
        finally:
            await end_tasks(*tasks, answered)

    async def _complete(self, request: Request, stop: tuple[str, ...]) -> list[Completion]:
        beams = request.params.beams
        answers = [
            PendingCompletion(request.params, self._text_stream(request, stop))
            for _ in range(1 if beams is None else beams.num_beams)
        ]
        async with self._places, contextlib.aclosing(self._coordinator.submit(request)) as events:
            async for event in events:
                if event.finish_reason is FinishReason.ERROR:
                    raise error_from_code(event.error_code, event.error_message)
                for rank, answer in enumerate(answers):
                    if answer.take(event if beams is None else beam_event(event, rank)):
                        # The last event, which carries the statistics, comes after this call.
                        self._coordinator.cancel(request.id)
        return [answer.completion() for answer in answers]

    def _text_stream(self, request: Request, stop: tuple[str, ...]) -> TextStream | None:
        if self.tokenizer is None and not stop:
            return None
        return TextStream(
            self._needed("stop"),
            stop,
            min_tokens=request.params.min_tokens,
            prompt_ids=request.prompt_ids,
        )


def _drawn(params: SamplingParams, stop_ids: Iterable[int]) -> SamplingParams:
    """`params` with a seed, and with these stop tokens too."""
    seed = asked_seed(params.seed)
    return dataclasses.replace(
        params,
        seed=draw_seed() if seed is None else seed,
        stop_token_ids=tuple(sorted({*params.stop_token_ids, *stop_ids})),
    )


def _tokenizer(folder: Path, generation_config: str, chat_template: str) -> Tokenizer | None:
    if chat_template:
        read_template(chat_template)  # an unreadable file is an error, a missing tokenizer is none
    try:
        return Tokenizer.load(
            folder, generation_config=generation_config, chat_template=chat_template
        )
    except ConfigError:
        return None  # prompts and results are token ids only


async def _served(worker: Any, link: Link[Any, Any]) -> None:
    try:
        await worker.serve(link)
    except Exception as error:  # noqa: BLE001 - what ends it is said; the others go on
        log.error("a worker has failed: %s", error)


async def _called(function: Callable[[], T]) -> T:
    return function()


def _as_prompts(prompts: Prompts) -> list[Prompt]:
    """A list of prompts; a text or a sequence of token ids counts as one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and all(isinstance(token, (int, np.integer)) for token in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))
