"""The drafter protocol: three methods.  A drafter may draft wrong tokens but never block or raise.

docs/own-drafter.md shows how to write one; `cluster.draft.plugin` has what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Protocol, runtime_checkable

from cluster.core import Commit, Observation, Proposal, SamplingParams
from cluster.grammar.text import ConstrainedText
from cluster.records import frozen
from cluster.requests.fields import GrammarSpec, derived_key


@frozen
class DraftTask:
    """Asks a drafter for one bounded slice of growth of one request's tree."""

    request_id: str
    generation: int
    max_nodes: int


@frozen
class DrafterContext:
    """The settings of one drafter that do not come from its own options.

    name: its name in the configuration, which it writes into its proposals.
    max_nodes: maximum size of a request's tree.  max_requests: maximum number of open requests.
    vocab_size, tokenizer_hash: the target's; 0 and "" while unknown.
    target: the `cluster.draft.host.Host` of a drafter inside the target, else None.
    stages: the drafters that a cascade is made of, by name.  is_stage: it is one of them.
    beside: another drafter, or the target that it is in, serves meanwhile in this process.
    target_model: the target's, as the configuration names it; "" while unknown.
    open_text: an empty text under a request's grammar, for drafters inside the target; it raises
    RequestError.  None elsewhere.
    """

    name: str
    max_nodes: int
    max_requests: int
    vocab_size: int = 0
    tokenizer_hash: str = ""
    target: Any = None
    open_text: Callable[[GrammarSpec], ConstrainedText] | None = None
    stages: Mapping[str, Drafter] = field(default_factory=dict)
    is_stage: bool = False
    beside: bool = False
    target_model: str = ""


class Drafter(Protocol):
    """Grows token trees that continue committed text.

    Calls come from one thread, one at a time.  The first commit of a request opens it.

    A class with the attribute `is_look_up = True` runs no model: a tree takes it well below a
    millisecond.  Inside a target it is asked where models would take longer than they bring.
    It says by `pages_in_use` and `pages_total` which KV pages it uses, and how many there are.
    One with `only_reads = True` drafts nothing: inside a target it is handed the rows of steps
    (`cluster.draft.inside.StepReader`), is told which requests have ended, and is asked nothing.
    Where it has a method `takes(request_id, tenant) -> bool`, the most probable tokens of others'
    steps need not be found for it.  Its method `begin()`, if any, is called once it is to serve.
    """

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        """Record committed tokens and re-root the trees; returns one observation per commit.

        A commit whose base_len exceeds the drafter's text, or whose prefix_hash differs from its
        own, changes nothing; the observation's have_len tells the sender where to resume.
        """
        ...

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """Grow the trees of `tasks` for one bounded slice (a few milliseconds at most).

        Returns only proposals that improved since the last call; complete trees and unknown
        requests are absent.  An empty result means that there is nothing left to grow.
        """
        ...

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget these requests; unknown ids are ignored."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """Optional protocol for drafters that can end a slice of growth early."""

    def interrupt(self) -> None:
        """End the current slice soon, because a commit has arrived.  Called from any thread."""
        ...


@runtime_checkable
class Grafting(Protocol):
    """Optional protocol for models that judge another drafter's tree, all nodes in one pass, where
    they have none of their own behind the text."""

    def graft(self, trees: Sequence[Proposal]) -> None:
        """Take these trees in at the next `propose`.  A node stays, with the model's survival, if
        its token is among the model's candidates there; else it is dropped with all below it."""
        ...


def is_useful(params: SamplingParams, position: int, token_id: int) -> bool:
    """True if a draft of `token_id` at output position `position` can save a step.

    The parent's draw emits a token that ends the text, whether or not the tree has a node for it.
    """
    if position + 1 >= params.max_tokens:
        return False
    # A drawn token is a draft whatever it is: leaving out some of them would bias the text.
    is_drawn = not params.is_coupled
    return is_drawn or position < params.min_tokens or token_id not in params.stop_token_ids


# The parameters of a request as its drafters are told them.


def told_params(params: SamplingParams, *, is_believed: bool) -> SamplingParams:
    """Return what a drafter is told.

    A drafter that knew the target's noise would bias a text that is not coupled to it.
    is_believed: its drafts are drawn from the laws that come with them.  Any other drafter is to
    choose the likeliest tokens, which are the best drafts without a law.  So is every drafter where
    a grammar cuts nodes off by what they are, which drawn nodes may not be.
    """
    if params.is_coupled:
        return params
    if not is_believed or params.grammar is not None:
        return replace(params, law="coupled", temperature=0.0, seed=None)
    return replace(params, seed=derived_key(params.noise_key, "draft"))


def params_beside_rows(params: SamplingParams) -> SamplingParams:
    """Return what a reader of steps is told: all but the noise of a text that drafts may bias."""
    return params if params.is_coupled else replace(params, seed=None)
