"""The engine's inputs and outputs, and the limits of what it can serve at all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from cluster.config.schema import EngineConfig
from cluster.core import EMPTY_TREE, TokenArray, TokenLogprob, TokenTree
from cluster.engine.cpu import kernels
from cluster.engine.memory.kv_cache import Reach
from cluster.engine.taps import Taps
from cluster.errors import ContextLengthError, RequestError
from cluster.records import frozen, record
from cluster.requests.fields import BeamEnd, Redraw
from cluster.spec.logprobs import TopTokens, top_tokens


@record
class Work:
    """Append `delta` at `base_len`, then evaluate the nodes of `tree` that have no KV yet.

    base_len: committed tokens the caller believes are cached.  Whatever the cache holds beyond
    them is dropped (a rollback), and so are all nodes unless `delta` is empty.
    delta: int32[k], may be empty.  tree: continues the base_len + k tokens.
    num_cached_nodes: the first so many nodes of `tree` already hold KV (a drafter's live tree);
    needs an empty delta.  prefix_hash: poly64 of the first base_len tokens, None = unchecked.
    tenant: with base_len 0, whose cached prefixes may be used and added to; else as it was.
    adapter: which one all rows run with, by its index in the engine's `adapters`; 0 = none.
    Keys and values are an adapter's own: those of another are dropped.

    What follows is asked of the leading rank alone; the default is nothing, which costs nothing.
    num_top: so many most probable tokens at each of the Output's rows of logits.
    """

    request_id: str
    base_len: int
    delta: TokenArray
    tree: TokenTree = EMPTY_TREE
    num_cached_nodes: int = 0
    prefix_hash: int | None = None
    tenant: bytes = b""
    num_top: int = 0
    adapter: int = 0

    @property
    def num_logit_rows(self) -> int:
        return self.num_new_nodes + (len(self.delta) > 0)

    def top(self, logits: torch.Tensor) -> TopTokens | None:
        """The most probable tokens that it asks for; None where it asks for none.

        logits: of its rows."""
        if not self.num_top:
            return None
        native = kernels.load() if logits.device.type == "cpu" else None
        if native is None or self.num_top > native.max_ranked:
            return top_tokens(logits, self.num_top)
        return native.top(logits, self.num_top)

    @property
    def context_len(self) -> int:
        return self.base_len + len(self.delta)

    @property
    def num_new_nodes(self) -> int:
        return len(self.tree.token_ids) - self.num_cached_nodes


@record
class Drawn:
    """The tokens of works that the host does not know yet.

    token_ids: int32[rows], on the device, which may still be drawing them; below 0 where it draws
    none.  rows: of each request, where its token stands."""

    token_ids: torch.Tensor
    rows: Mapping[str, int]


@record
class Output:
    """The engine's answer to one Work; exactly one of logits, have_len and error is set.

    logits: float32 [rows, vocab] on the engine's device: one row after the last delta token where
    delta is non-empty, then one per new node in tree order.
    have_len: the cache holds only so many committed tokens (lost, preempted, or another prefix);
    send the rest.  It equals base_len where only the cached nodes were lost: send the whole tree.
    error: this work can never be served as it is.
    top: beside the logits where the work has num_top: of the same rows.
    num_cached: tokens of the work that were found in the prefix cache.
    """

    request_id: str
    logits: torch.Tensor | None = None
    have_len: int | None = None
    error: RequestError | None = None
    top: TopTokens | None = None
    num_cached: int = 0


@record
class Verdict:
    """The target's answer to one text and the tree that continued it.

    context_len: tokens before the first of token_ids.  path: accepted nodes of the tree, root
    first.  token_ids: int32[len(path) + 1], the path's tokens and one more of the target's.
    """

    request_id: str
    context_len: int
    path: TokenArray
    token_ids: TokenArray
    logprobs: tuple[TokenLogprob, ...] = ()
    num_cached: int = 0  # tokens that were found in the prefix cache
    beams: tuple[BeamEnd, ...] = ()  # only of a beam search: token_ids are all its texts
    redraws: tuple[Redraw, ...] = ()  # only of an audit


@record
class StepSummary:
    """One Engine.step.

    num_rows: rows of the forward, padding excluded.  num_prefill_rows: those of works that were
    cut into chunks or are longer than a decoding step's.  num_prompt_rows: those of all works that
    brought more than one token.  num_sequences: works completed.
    num_nodes: tree nodes evaluated.  num_preempted: sequences whose cache was dropped.
    num_prefix_hit_tokens: prompt tokens found in the prefix cache.
    taps: where the step was asked for some; kept until the next step.
    """

    num_rows: int = 0
    num_prefill_rows: int = 0
    num_prompt_rows: int = 0
    num_sequences: int = 0
    num_nodes: int = 0
    num_preempted: int = 0
    num_prefix_hit_tokens: int = 0
    forward_time_s: float = 0.0
    step_time_s: float = 0.0
    taps: Taps | None = None


# Ends a step that ran ahead; returns the works that it answered.
Finish = Callable[[Collection[str]], list[Output]]


class Steps(Protocol):
    """The part of an engine that runs works of one request after another."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def vocab_size(self) -> int: ...
    @property
    def longest_context(self) -> int: ...
    def submit(self, work: Work) -> None: ...
    def step(self) -> list[Output]: ...
    def retain(self, request_id: str, path: Sequence[int], keep: Sequence[int] = ()) -> None: ...
    def release(self, request_id: str) -> None: ...


def run_alone(engine: Steps, work: Work) -> Output:
    """The answer to a work that nothing else waits beside."""
    engine.submit(work)
    outputs: list[Output] = []
    while not outputs:
        outputs = engine.step()
    return outputs[0]


# The limits of what an engine can serve at all, and the errors for works beyond them.


@frozen
class EngineLimits:
    """The sizes no schedule can get around.

    num_pages, reaches: of each group of layers, its pages and which ones a long text needs."""

    vocab_size: int
    max_context_len: int
    num_pages: tuple[int, ...]
    reaches: tuple[Reach, ...]
    max_rows: int

    @property
    def longest_context(self) -> int:
        """Tokens of the longest text that can be served."""
        short = self._short_of_pages(self.max_context_len, self.max_rows)
        return min([self.max_context_len, *(pages * reach.page_size for reach, pages in short)])

    def _short_of_pages(self, context_len: int, num_nodes: int) -> Iterator[tuple[Reach, int]]:
        """The groups, with their pages, that cannot hold such a text."""
        for reach, num_pages in zip(self.reaches, self.num_pages, strict=True):
            if reach.most_pages(context_len + num_nodes, self.max_rows + num_nodes) > num_pages:
                yield reach, num_pages

    def refusal(self, work: Work, adapters: Container[int]) -> RequestError | None:
        """The error for a work that no schedule can ever run, or that asks for what there is not.

        adapters: the indices that rows may have.
        The shapes of trees are checked where they come in (`cluster.spec.tree_check`)."""
        if work.adapter not in adapters:
            return RequestError(
                f"adapter {work.adapter} is asked for, which is not loaded; use 0 for none or the "
                "index of one that is"
            )
        for name, token_ids in (("delta", work.delta), ("tree", work.tree.token_ids)):
            # One comparison for both ends: a negative id is a large one without its sign.
            if len(token_ids) and token_ids.view(np.uint32).max() >= self.vocab_size:
                return RequestError(
                    f"the {name} holds token ids outside the vocabulary 0..{self.vocab_size - 1}"
                )
        error = self.too_large(work.context_len, len(work.tree))
        if error is None and work.num_new_nodes + 1 > self.max_rows:
            error = RequestError(
                f"{work.num_new_nodes} draft nodes do not fit one step of {self.max_rows} rows; "
                "send fewer or raise engine.max_batch_tokens"
            )
        return error

    def too_large(self, context_len: int, num_nodes: int) -> RequestError | None:
        """The error for a text with live nodes behind it that the cache can never hold."""
        if context_len > self.max_context_len:
            return ContextLengthError(
                f"the context has {context_len} tokens, the limit is {self.max_context_len}; "
                "shorten it or raise engine.max_context_len"
            )
        for reach, num_pages in self._short_of_pages(context_len, num_nodes):
            return ContextLengthError(
                f"{context_len} tokens and {num_nodes} draft nodes need more than "
                f"all {num_pages} pages of {reach.page_size} tokens; shorten the text or raise "
                "engine.num_pages"
            )
        return None
