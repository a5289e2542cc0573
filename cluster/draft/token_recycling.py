"""Token recycling: drafts from what the target thought likely after the same words before.

Luo et al., "Turning Trash into Treasure" (2024).  A step gives the most probable tokens of every
row, those of rejected drafts too; they are kept by the words that they followed, the newest in
place of older ones, and drafts follow them from word to word.  Kept too are those after two words,
which agree more often where they are known.

With a *window* it is lookahead (Fu et al., "Break the Sequential Dependency", 2024): some nodes of
every tree are guesses at the next positions, of which each is what the target said at the row
before it one step ago (a Jacobi iteration).  The window's rows are nodes like all others: they are
verified when the budget takes them, one that is right is accepted, and what is likely behind them
is kept.  Since the noise of a position is known, the target's own draw there is guessed at every
temperature.

The requests of a tenant and task class share what they keep, as those of the suffix drafter do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from cluster.config.parse import NonNegativeInt, PositiveInt, Share
from cluster.core import FloatArray, TokenArray, TokenTree
from cluster.draft.base import DrafterContext, is_useful
from cluster.draft.committed_text import by_key
from cluster.draft.inside import StepRows, StepWants, host_of
from cluster.draft.native import lookups as native
from cluster.draft.suffix import CountDrafter, CountState
from cluster.records import frozen
from cluster.spec.tree import walk

# Under this evidence the window's hit rate is kept: of all guesses alike.
_GUESS = 1


@frozen
class TokenRecyclingOptions:
    """The target's own next choices after the same words, from its earlier steps."""

    num_top: PositiveInt = 8
    """Most probable tokens that are kept after each context."""
    max_words: PositiveInt = 2
    """Words of the longest context, in tokens; shorter ones are kept too."""
    max_contexts: PositiveInt = 100_000
    """Contexts that one store keeps, at about 250 bytes each; when it is full, those that were
    written longest ago are dropped."""
    max_stores: PositiveInt = 8
    """Number of stores; each tenant and task class has its own, and the one unused for longest is
    dropped."""
    min_survival: Share = 0.02
    """Less likely nodes are left out."""
    window: NonNegativeInt = 0
    """Guesses at later positions that ride in each tree, at most half of its nodes."""


@frozen
class LookaheadOptions(TokenRecyclingOptions):
    """Token recycling with guesses at later positions, which ride along in each tree."""

    REMOVED: ClassVar = {
        "ngram": "drafts go on word by word after max_words of them, so remove it",
        "max_chains": "set num_top, the tokens that are kept after the same words",
    }

    window: NonNegativeInt = 4
    """Guesses at later positions that ride in each tree, at most half of its nodes."""


@dataclass(slots=True, eq=False)
class RecyclingState(CountState):
    """guesses: the window, from the position guessed_at on.  drafted: those of the newest tree."""

    guesses: list[int] = field(default_factory=list)
    guessed_at: int = 0
    drafted: list[int] = field(default_factory=list)


class TokenRecyclingDrafter(CountDrafter[RecyclingState]):
    """Drafts inside the target alone: nobody else sees what it thinks likely."""

    def __init__(self, context: DrafterContext, options: TokenRecyclingOptions) -> None:
        super().__init__(context, options.min_survival, RecyclingState.opened_by)
        host_of(context, "token_recycling")
        self._max_words = options.max_words
        self._window = options.window
        self._stores = by_key(
            lambda: native.Adjacency(options.max_contexts, options.max_words), options.max_stores
        )
        # How often a guess is right where those before it are.
        self._guess_rates = by_key(native.HitRates)
        self.wants = StepWants(num_top=options.num_top)

    def read(self, rows: Sequence[StepRows]) -> None:
        """See `StepReader`: keep what every row thought likely, and move the window on."""
        for each in rows:
            if (top := each.top) is not None:
                state = self._requests.get(each.request_id, each.generation)
                text = None if state is None else state.text
                before = each.last_words(self._max_words, text)
                nodes = each.token_ids[each.num_context :]
                self._stores((each.tenant, each.task)).keep(
                    before, nodes, each.parents, top.token_ids, top.logprobs
                )
                if self._window and state is not None:
                    _move_on(state, each)

    def _source(self, state: RecyclingState) -> native.Adjacency:
        return self._stores(state.circle)

    def _drafts(
        self, asked: Sequence[tuple[RecyclingState, int]]
    ) -> Iterator[tuple[RecyclingState, TokenTree, FloatArray]]:
        """With the window's guesses, which take at most half of the nodes."""
        asked = [each for each in asked if each[0].next_position >= 0]
        for state, max_nodes in asked:
            state.drafted = self._guessed(state, max_nodes // 2)
        rest = [(state, max_nodes - len(state.drafted)) for state, max_nodes in asked]
        for state, tree, survival in super()._drafts(rest):
            if state.drafted:
                rate = self._guess_rates(state.group).rate(_GUESS)
                tree, survival = with_chain(tree, survival, state.drafted, rate)
            yield state, tree, survival

    def _guessed(self, state: RecyclingState, most: int) -> list[int]:
        """The guesses behind the text, made up to the window's length by repeating words of it: any
        words do to begin with."""
        if state.guessed_at != len(state.text):
            state.guesses, state.guessed_at = [], len(state.text)
        missing = self._window - len(state.guesses)
        if missing > 0:
            state.guesses += state.text.token_ids[-missing:].tolist()
        useful: list[int] = []
        for token in state.guesses[: min(self._window, most)]:
            if not is_useful(state.params, state.next_position + len(useful), token):
                break
            useful.append(token)
        return useful

    def _advance(self, state: RecyclingState, kept_len: int, token_ids: TokenArray) -> None:
        if state.drafted and kept_len == len(state.text):
            rates = self._guess_rates(state.group)
            for guess, token in zip(state.drafted, token_ids.tolist(), strict=False):
                rates.record(_GUESS, hit=guess == token)
                if guess != token:
                    break
        state.drafted = []
        super()._advance(state, kept_len, token_ids)


def _move_on(state: RecyclingState, rows: StepRows) -> None:
    """One Jacobi iteration: what the target said at each guess is the next guess behind it."""
    end = rows.first_position + rows.num_context  # the first draft's position
    guesses = state.guesses if state.guessed_at == end else []
    path = [-1, *walk(TokenTree(rows.token_ids[rows.num_context :], rows.parents), guesses)]
    drawn = len(rows.path) + 1
    # Guesses whose rows were not verified stay as they are.
    state.guesses = guesses[max(len(path), drawn) :]
    state.guessed_at = end + drawn
    if which := [node + 1 for node in path[drawn:]]:
        assert rows.top is not None
        token_ids, logprobs = rows.top.token_ids[which], rows.top.logprobs[which]
        said = state.counted.draws(end + drawn - state.prompt_len, token_ids, logprobs)
        state.guesses = said + state.guesses


def with_chain(
    tree: TokenTree, survival: FloatArray, chain: Sequence[int], rate: float
) -> tuple[TokenTree, FloatArray]:
    """The tree with a chain behind the text, whose nodes are new where the tree has not got them.

    rate: probability that a new node is right where its parent is."""
    path = walk(tree, chain)
    end, added = (path or [-1])[-1], chain[len(path) :]
    parents = [end, *range(len(tree), len(tree) + len(added))][: len(added)]
    reached = float(survival[end]) if path else 1.0
    found = np.append(survival, reached * rate ** np.arange(1, len(added) + 1))
    tokens = [*tree.token_ids.tolist(), *added]
    return TokenTree.of(tokens, [*tree.parents.tolist(), *parents]), found.astype(np.float32)
