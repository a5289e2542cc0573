"""One engine for any Hugging Face causal LM: the target's and the drafting LM's.

engine = Engine.load(config)
engine.submit(Work("a", base_len=0, delta=prompt, tree=drafts))
for output in engine.step(): ...      # one forward over what the scheduler picks
engine.retain("a", accepted_path)     # keep the KV of accepted nodes
engine.release("a")  # one thread owns an engine
"""

from __future__ import annotations

import time
from collections.abc import Collection
from collections.abc import Sequence as Indices
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.config.schema import EngineConfig
from cluster.core import EMPTY_TOKENS, TokenArray, TokenTree
from cluster.engine.adapters import Adapters
from cluster.engine.cpu.growth import TreeGrower
from cluster.engine.graphs.capture import Capture
from cluster.engine.loading import progress, self_check
from cluster.engine.loading.inspection import check_sizes
from cluster.engine.loading.model import ExtraLayers, LoadedModel, identify, load_model
from cluster.engine.loading.profile import MOST_ON_CPU, profile_steps
from cluster.engine.loading.renumbered import Numbering
from cluster.engine.memory.kv_cache import KVCache, layer_groups
from cluster.engine.memory.page_owners import PageOwners
from cluster.engine.memory.pool_sizes import (
    derive_num_pages,
    derive_num_states,
    measured,
    num_logit_rows,
)
from cluster.engine.memory.sequence import Sequence, Slots
from cluster.engine.parallel import RankGroup
from cluster.engine.paths import Events
from cluster.engine.schedule.batch import tapped
from cluster.engine.schedule.scheduler import Launched, PromptPace, Scheduler
from cluster.engine.step import Forward
from cluster.engine.types import LayerSpec
from cluster.engine.work import Drawn, EngineLimits, Finish, Output, StepSummary, Work
from cluster.spec.step_profile import StepProfile

__all__ = ["Engine", "Output", "StepSummary", "Work"]


class Engine:
    """A model, its KV cache, and the works waiting for them, one of a request at a time.

    A work's tokens, and its tree's nodes until `retain`, are cached once it is answered.  What a
    step cannot take waits, and what the cache has lost is answered with `Output.have_len`."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        *,
        group: RankGroup | None = None,
        capture: Capture | None = None,
        extra_layers: Indices[LayerSpec] = (),
        logit_rows: int | None = None,
    ) -> None:
        """capture: how graphs are captured; None = by CUDA, where it can be.  extra_layers: of rank
        0, caches behind the model's, on the same pages, for a head that writes them (`slots`).
        logit_rows: as in `num_logit_rows`."""
        if group is not None:
            extra_layers = group.share_layers(extra_layers, model.layers[0])
        self.layers = layers = (*model.layers, *extra_layers)
        self._logit_rows = num_logit_rows(config, logit_rows)
        self.reserve = measured(config, model, self._logit_rows)
        num_pages = derive_num_pages(config, layers, model.max_context_len, self.reserve.total)
        if group is not None:
            num_pages = tuple(group.minimum(each) for each in num_pages)
        check_sizes(config, model.max_context_len, min(num_pages))
        num_states = derive_num_states(config, layers, self.reserve.total)
        reaches = tuple(each.reach for each in layer_groups(layers, config.page_size))
        sizes = model.vocab_size, model.max_context_len, num_pages
        self.limits = EngineLimits(*sizes, reaches, config.max_batch_tokens)
        self.model_hash, self.tokenizer_hash = identify(model)
        if group is not None:
            told = self.limits, config.max_running_sequences, config.prefix_cache, self.model_hash
            group.end_loading(told)  # all that decides how ranks schedule, and their model
        self.cache = KVCache(layers, num_pages, config.page_size, num_states)
        self.config, self.model = config, model
        self.device, self.vocab_size = model.device, model.vocab_size
        self.num_columns, self.max_context_len = model.num_columns, model.max_context_len
        self.longest_context = self.limits.longest_context
        self.eos_token_ids = model.eos_token_ids
        self._last_step: tuple[StepSummary, Events | None] = StepSummary(), None
        self.page_owners = PageOwners(self.cache, config)
        self._scheduler = Scheduler(self.page_owners, config)
        self.pace = PromptPace(config.max_batch_tokens, config.max_chunk_s)
        self.forward = Forward(config, model, self.cache, None if group is None else group.all)
        self._clock = time.perf_counter
        # The sequences with a pending work, in order of submission.
        self._waiting: dict[str, None] = {}
        # Works that can never run, answered by the next step.
        self._refused: dict[str, Output] = {}
        # Whether the last schedule was empty: then only a call from outside can change that.
        self._blocked = False
        self._group: RankGroup | None = None
        self.forward.settle(lambda: self_check.check(self, model))
        self.forward.use_graphs(capture, lambda: self_check.check(self, model))
        self.forget_prefixes()
        # Grows trees; None where steps, as those of the check, do not run in native code alone.
        self.grower: TreeGrower | None = None
        if group is None and model.native is not None and model.native.grows_on(self.cache):
            self.grower = TreeGrower(model.native, self.cache, self.max_context_len, self)
        # Set last: during the self-check every rank calls for itself.
        self._group = group

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        extra_layers: ExtraLayers = lambda _: (),
        *,
        numbering: Numbering | None = None,
        logit_rows: int | None = None,
        beside: bool = False,
    ) -> Engine:
        """Load the model as `load_model` says, on every rank after `parallel.init_rank`."""
        model = load_model(config, numbering, beside=beside)
        group = RankGroup() if config.tensor_parallel > 1 else None
        extra = extra_layers(model)
        engine = cls(config, model, group=group, extra_layers=extra, logit_rows=logit_rows)
        engine.capture_ahead()
        return engine

    @property
    def has_pending(self) -> bool:
        """True if a step would do anything.  False while every work waits for pages that only a
        release or retain can free."""
        return bool(self._refused) or (bool(self._waiting) and not self._blocked)

    @property
    def last_step(self) -> StepSummary:
        """Waits until a GPU is done with the step; raises WorkerError where it fails there."""
        self._last_step = self.forward.timed(*self._last_step), None
        return self._last_step[0]

    @property
    def adapters(self) -> Adapters:
        """The adapters that works may ask for, as of now."""
        return self.model.adapters.current

    def drop_unused_adapters(self) -> None:
        """Free what `model.adapters` serves no more and no request runs with."""
        if self.adapters.dropped:
            self.model.adapters.drop_unused(self.page_owners.adapters_in_use())

    @property
    def uses_graphs(self) -> bool:
        """True if steps that are not too wide replay captured graphs."""
        return self.forward.graphs is not None and not self.forward.graphs.failure

    def capture_ahead(self, taps: Indices[int] = ()) -> None:
        """Capture the graphs, if any, of steps that ask for these taps, so that no step waits."""
        if self.forward.graphs is not None:
            progress.begin("warm")
            wanted = self.model.resolve_taps(taps)  # before other ranks hear of them
            if self._group is not None and self._group.leads:
                self._group.send("capture_ahead", taps)
            self.forward.graphs.capture_ahead(taps=wanted)

    @property
    def pages_in_use(self) -> int:
        return sum(pool.num_held for pool in self.page_owners.pools)

    @property
    def pages_total(self) -> int:
        return sum(pool.num_pages for pool in self.page_owners.pools)

    def cached_len(self, request_id: str) -> int:
        """Committed tokens of the request in the cache, 0 if it is unknown."""
        sequence = self.page_owners.sequences.get(request_id)
        return 0 if sequence is None else sequence.cached_len

    def context_ids(self, request_id: str) -> TokenArray:
        """The request's committed tokens in the cache: int32[cached_len], a copy."""
        sequence = self.page_owners.sequences.get(request_id)
        return EMPTY_TOKENS if sequence is None else sequence.tokens.copy()

    def slots(self, request_id: str, layer: int = -1) -> Slots:
        """The slots of the request's tokens and nodes in that layer of `cache`, a copy until the
        next call on it or step: int64[tokens + nodes].  Rows that left a window: scratch ones."""
        return self.page_owners.slots(request_id, layer)

    def profile_steps(self) -> StepProfile | None:
        """Measure what steps take by their rows, for some seconds; while nobody is served."""
        # A GPU keeps memory for so many rows with logits.
        most = MOST_ON_CPU if self.device.type == "cpu" else self._logit_rows
        profile = profile_steps(self, min(self.config.max_batch_tokens, most))
        self.pace.begin(profile)
        self.forget_prefixes()
        return profile

    def forget_prefixes(self) -> None:
        """Empty the prefix cache of pages that no request holds."""
        self.page_owners.forget_prefixes()
        self._tell("forget_prefixes")

    def submit(self, work: Work) -> None:
        """Queue one work; a step answers it, before which its request may have no other."""
        name = work.request_id
        assert name not in self._waiting, f"{name} has a work"
        self._blocked = False
        error = self.limits.refusal(work, self.adapters)
        if error is not None:
            self._refused[name] = Output(name, error=error)
            return
        self._tell("submit", work)
        sequence = self.page_owners.enter(name)
        sequence.work, sequence.is_open = work, False
        self._waiting[name] = None

    def step(self, taps: Indices[int] = (), prompt_rows: int | None = None) -> list[Output]:
        """One forward over the works the scheduler picks; returns those that are over.

        A work that was cut appears once its last chunk has run.  taps: see `cluster.engine.taps`;
        they stand in `last_step`, of unfinished chunks too.  prompt_rows: of prompts at most; None
        = as the pace says on rank 0.  Raises ConfigError for taps that the model has not, before
        anything runs, and WorkerError when the device or another rank fails; discard it then.
        Where memory is short, OutOfMemoryError: release the requests, and run fewer at a time."""
        return self._finish(self._launch(taps, prompt_rows))

    @property
    def runs_ahead(self) -> bool:
        """Whether `run_ahead` may begin anything."""
        return self._group is None and self.uses_graphs

    def run_ahead(self, works: Indices[Work], drawn: Drawn, taps: Indices[int]) -> Finish | None:
        """Begin the step behind the last one, whose works bring a token each that is not known yet.

        What is returned ends it once it is known, before anything else is asked of the engine: to
        be called with the requests that are to be left as they were; the `delta` of the others
        holds its token by then.  None: it cannot run ahead, and nothing was done."""
        owners = self.page_owners
        missing = sum(
            owners.num_pages_missing(owners.enter(each.request_id), each.context_len)
            for each in works
        )
        # Short of pages one would wait, or lose those whose rows of the last step are still read.
        is_over = not 0 < 2 * len(works) <= self._logit_rows  # of two steps at a time
        if self._waiting or is_over or missing > owners.num_available:
            return None
        for work in works:
            self.submit(work)
        return partial(self._finish, self._launch(taps, drawn=drawn))

    def _launch(
        self, taps: Indices[int], prompt_rows: int | None = None, drawn: Drawn | None = None
    ) -> Launched:
        if drawn is None:  # else the last step may not be done, and nobody is to wait for a GPU
            self.pace.learn(self.last_step)
        start = self._clock()
        wanted = self.model.resolve_taps(taps)
        waiting = [self.page_owners.sequences[name] for name in self._waiting]
        prompt_rows = prompt_rows or self.pace.rows(waiting)
        if self._group is not None and self._group.leads:
            self._group.send("step", taps, prompt_rows)
        schedule = self._scheduler.schedule(waiting, prompt_rows)
        # Shares of similar length stand side by side, so that a backend can serve them together.
        schedule.picks.sort(key=lambda pick: pick.sequence.cached_len)
        agreed: AbstractContextManager[None] = nullcontext()
        if self._group is not None:
            told = schedule.told(self.page_owners.pools)
            agreed = self._group.agreeing(told, "what this step is to run", self.device)
        schedule.answers[:0] = self._refused.values()  # which rank 0 alone may have
        self._refused.clear()
        self._blocked = not schedule.picks and not schedule.answers
        forward_start = self._clock()
        with agreed:
            found = self.forward(schedule.picks, wanted, drawn)
        now, rows = self._clock(), tapped(schedule.picks, found.taps)
        return Launched(schedule, found, schedule.summary(now - forward_start, now - start, rows))

    def _finish(self, launched: Launched, lost: Collection[str] = ()) -> list[Output]:
        start = self._clock()
        outputs = launched.commit(self.page_owners, lost)
        for name in [*lost, *(each.request_id for each in outputs)]:
            self._waiting.pop(name, None)
        took_s = launched.summary.step_time_s + self._clock() - start
        self._last_step = replace(launched.summary, step_time_s=took_s), launched.found.events
        return outputs

    def opened(self, work: Work, max_slots: int) -> Sequence | Output | None:
        """See `TreeTexts`."""
        sequence = self.page_owners.enter(work.request_id)
        have_len = self.page_owners.open(work, sequence)
        if have_len is not None:
            return Output(work.request_id, have_len=have_len)
        length = work.context_len + max_slots
        if not self.page_owners.has_room(sequence, length):
            return None
        self.page_owners.reserve(sequence, length)
        return sequence

    def written(self, sequence: Sequence, work: Work, tree: TokenTree) -> None:
        """See `TreeTexts`."""
        if len(work.delta):
            self.page_owners.commit(sequence, work.delta[sequence.cached_len - work.base_len :])
        sequence.tree = tree

    def retain(self, request_id: str, path: Indices[int], keep: Indices[int] = ()) -> None:
        """After a step: commit the nodes `path`, keep the nodes `keep`, drop all others.

        path: root first, a real path from the context.  keep: ascending indices into the tree of
        the last step; the parent of each is kept too or is the path's last node (the context where
        the path is empty).  They stay as live nodes, renumbered in this order.  Their KV moves in
        place, nothing is computed.  A target retains (path), a drafter (path so far, survivors).
        What is unknown or has lost its cache is left alone; its next work is told of that.
        """
        sequence = self.page_owners.sequences.get(request_id)
        if sequence is None or not sequence.num_pages:
            return
        assert sequence.work is None, f"{request_id} has a work: retain before submit"
        path, keep = tuple(path), tuple(keep)
        self.page_owners.retain(sequence, path, keep)
        self._blocked = False
        self._tell("retain", request_id, path, keep)

    def release(self, request_id: str) -> None:
        """Forget a request and its pending work; an unknown one is no error."""
        self._waiting.pop(request_id, None)
        self._refused.pop(request_id, None)
        self.page_owners.leave(request_id)
        self._blocked = False
        self._tell("release", request_id)

    def follow(self) -> None:
        """Repeat rank 0's calls until it closes; raises WorkerError when the group breaks."""
        assert self._group is not None, "an engine of one rank follows nobody"
        self._group.follow(self)

    def _tell(self, name: str, *arguments: Any) -> None:
        """Have the other ranks repeat a call."""
        if self._group is not None and self._group.leads:
            self._group.record(name, *arguments)

    def close(self) -> None:
        """Let the other ranks go; an engine of one rank has nothing to close."""
        if self._group is not None:
            self._group.close()
        self._group = None
