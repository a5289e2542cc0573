"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.core import EMPTY_TREE, TokenArray, TokenTree
from cluster.errors import RequestError


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Append `delta` at `base_len`, then evaluate the nodes of `tree` that have no KV yet.

    base_len: committed tokens the caller believes are cached.  Whatever the cache holds beyond
    them is dropped (a rollback), and so are all nodes unless `delta` is empty.
    delta: int32[k], may be empty.  tree: continues the base_len + k tokens.
    num_cached_nodes: the first so many nodes of `tree` already hold KV (a drafter's live tree);
    needs an empty delta.  prefix_hash: poly64 of the first base_len tokens, None = unchecked.
    tenant: with base_len 0, whose cached prefixes may be used and added to; else as it was.
    """

    request_id: str
    base_len: int
    delta: TokenArray
    tree: TokenTree = EMPTY_TREE
    num_cached_nodes: int = 0
    prefix_hash: int | None = None
    tenant: bytes = b""

    @property
    def context_len(self) -> int:
        return self.base_len + len(self.delta)

    @property
    def num_new_nodes(self) -> int:
        return len(self.tree) - self.num_cached_nodes


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """The engine's answer to one Work; exactly one of the three fields below is set.

    logits: float32 [rows, vocab] on the engine's device: one row after the last delta token where
    delta is non-empty, then one per new node in tree order.
    have_len: the cache holds only so many committed tokens (lost, preempted, or another prefix);
    send the rest.  It equals base_len where only the cached nodes were lost: send the whole tree.
    error: this work can never be served as it is.
    """

    request_id: str
    logits: torch.Tensor | None = None
    have_len: int | None = None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One Engine.step.

    num_rows: rows of the forward, padding excluded.  num_prefill_rows: those of works that were
    cut into chunks or are longer than a decoding step's.  num_sequences: works completed.
    num_nodes: tree nodes evaluated.  num_preempted: sequences whose cache was dropped.
    num_prefix_hit_tokens: prompt tokens found in the prefix cache.
    """

    num_rows: int = 0
    num_prefill_rows: int = 0
    num_sequences: int = 0
    num_nodes: int = 0
    num_preempted: int = 0
    num_prefix_hit_tokens: int = 0
    forward_time_s: float = 0.0
    step_time_s: float = 0.0
