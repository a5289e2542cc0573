"""For drafters inside the target that draft from what its steps compute: hidden rows, top tokens.

Such a drafter is a `Drafter` that is also a `StepReader`: it says what it wants of every step, and
is handed the rows of every step, before it hears of what was committed and is asked for trees.
`DrafterContext.target` is the `Host` that it runs in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from cluster.core import SamplingParams, TokenArray
from cluster.draft.base import DrafterContext
from cluster.errors import ConfigError
from cluster.records import frozen, record
from cluster.spec.token_log import TokenLog

if TYPE_CHECKING:  # drafters of the pool run without torch
    import torch

    from cluster.draft.host import Host
    from cluster.spec.logprobs import TopTokens

IndexArray = npt.NDArray[np.int64]


@frozen
class StepWants:
    """The wishes of a drafter for each of the target's steps; none by default, which costs nothing.

    taps: hidden states of all rows, see `cluster.engine.taps`; -1 = after the final norm.
    num_top: most probable tokens of each row that has logits.
    """

    taps: tuple[int, ...] = ()
    num_top: int = 0

    def __or__(self, other: StepWants) -> StepWants:
        return StepWants(
            tuple(dict.fromkeys((*self.taps, *other.taps))), max(self.num_top, other.num_top)
        )


WANTS_NOTHING = StepWants()


_PLAIN = SamplingParams()


@record
class StepRows:
    """One step's rows of one sequence: first those of its text, then all nodes of its tree.

    first_position: where in the text the first row's token stands.
    token_ids: int32[rows].  num_context: rows of the text; the nodes follow in the tree's order.
    parents: int32[nodes], -1 = the last context row.  path: the nodes that were accepted; they are
    text now.  next_token: drawn behind the text, without a row; None while the prompt is being
    read, whose chunks have no nodes either.
    taps: [rows, taps, hidden], in the order of the reader's `wants`; None where it wants none: then
    of the text only the last row is here, and chunks of prompts are not.
    top: of the last rows, so many as it has: the last context row and the nodes; None for chunks.
    task, tenant, params, adapter: the request's; of params without what the noise is made of, where
    drafts may bias the text.
    """

    request_id: str
    generation: int
    task: str
    tenant: bytes
    first_position: int
    token_ids: TokenArray
    num_context: int
    parents: TokenArray
    path: TokenArray
    next_token: int | None
    taps: torch.Tensor | None = None
    top: TopTokens | None = None
    params: SamplingParams = _PLAIN
    adapter: str = ""

    @property
    def text_rows(self) -> IndexArray:
        """The rows whose tokens are text, which stand at first_position and behind it: int64[n]."""
        return np.concatenate((np.arange(self.num_context), self.num_context + self.path))

    def last_words(self, count: int, text: TokenLog | None) -> TokenArray:
        """The last `count` tokens of the text up to its last row, or so many as are known.

        text: the request's, as the reader knows it."""
        end = self.first_position + self.num_context
        if self.num_context < count and text is not None and len(text) >= end:
            return text.since(max(end - count, 0), end)
        return self.token_ids[max(self.num_context - count, 0) : self.num_context]

    def seen_by(self, wants: StepWants, union: StepWants) -> StepRows:
        """These rows, of which one reader wants `wants` and all together `union`."""
        taps, top, num_top = self.taps, self.top, wants.num_top
        if taps is not None and wants.taps != union.taps:
            columns = [union.taps.index(tap) for tap in wants.taps]
            taps = taps[:, columns] if columns else None
        if top is not None and num_top != union.num_top:
            token_ids, logprobs = top.token_ids[:, :num_top], top.logprobs[:, :num_top]
            top = replace(top, token_ids=token_ids, logprobs=logprobs) if num_top else None
        if taps is self.taps and top is self.top:
            return self
        return replace(self, taps=taps, top=top)


@runtime_checkable
class StepReader(Protocol):
    """Optional protocol for drafters inside the target.

    One with layers of its own in the target's KV cache has a class method `kv_layers(options, like)
    -> Sequence[LayerSpec]` too; `Host.caches` are those layers.
    """

    @property
    def wants(self) -> StepWants:
        """The same at all times."""
        ...

    def read(self, rows: Sequence[StepRows]) -> None:
        """Take what a step computed, of all sequences, drafted for or not.

        Positions that come again replace what came before.  Some may be missing: what a sequence
        found in the prefix cache, and what came while the drafter was left alone.
        """
        ...


def host_of(context: DrafterContext, kind: str) -> Host:
    """The drafter's host; raises ConfigError outside of a target."""
    if context.target is None:
        path = f"drafters.{context.name}.placement"
        raise ConfigError.at(
            path,
            f"{kind} reads the target's steps and cannot run in a process of its own; set it to "
            "{with: target}",
        )
    return context.target
