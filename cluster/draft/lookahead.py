"""Lookahead: n-grams of the target's own guesses at later positions (Fu et al. 2024).

Some nodes of every tree are a *window*: guesses at the next positions, of which each is what the
target said at the row before it one step ago (a Jacobi iteration).  What the target says behind
them, and behind every other row, gives n-grams; those that begin with the text's last words are
drafted as chains.  The window's rows are nodes like all others: they are verified when the budget
takes them, and one that is right is accepted.  Since the noise of a position is known, the target's
own draw there is guessed at every temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from cluster.config.parse import NonNegativeInt, PositiveInt, Range, Share
from cluster.core import Commit, FloatArray, SamplingParams, TokenArray, TokenTree
from cluster.draft.base import DrafterContext
from cluster.draft.bounded import Bounded
from cluster.draft.count_drafter import CountDrafter, CountState
from cluster.draft.coupling import gumbel_scalar, is_useful
from cluster.draft.hit_rates import HitRates
from cluster.draft.indexed_text import SEPARATOR, Match
from cluster.draft.inside import StepRows, StepWants, host_of
from cluster.draft.lookups import CountedText
from cluster.draft.native import lookups as native
from cluster.spec.params import divisor

# With noise the draw is one of the most probable tokens; with more of them it is hardly ever
# another one.
_NUM_TOP = 8
# An older n-gram after the same words counts so much less than the next newer one.
_OLDER = 0.7
# Words before the n-gram's continuation: those after two agree more often than those after one.
_MAX_KEY = 2
# Under this evidence the window's hit rate is kept: of all guesses alike.
_GUESS = 1

Words = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LookaheadOptions:
    """Guesses at later positions ride along in each tree, and become n-grams to draft from."""

    window: NonNegativeInt = 4
    """Guesses at later positions that ride in each tree, at most half of its nodes."""
    ngram: Annotated[int, Range(2)] = 5
    """Tokens of an n-gram, of which the first one or two are looked up."""
    max_chains: PositiveInt = 6
    """N-grams that are kept after the same words, the newest."""
    max_contexts: PositiveInt = 50_000
    """Words that one store keeps n-grams after."""
    max_stores: PositiveInt = 8
    """Number of stores; each tenant and task class has its own, and the one unused for longest is
    dropped."""
    min_survival: Share = 0.02
    """Less likely chains are left out."""


class GramPool:
    """The n-grams of one size by their first words, the newest last; bounded.

    A `Source`; native/chains.cpp does the same.
    """

    def __init__(self, max_contexts: int, max_chains: int, ngram: int) -> None:
        self._max_contexts = max_contexts
        self._max_chains = max_chains
        self._ngram = ngram
        # Keys -> chains, each with a separator behind it.
        self._after: dict[Words, dict[Words, None]] = {}

    def __len__(self) -> int:
        return len(self._after)

    def keep(
        self, rows: StepRows, before: TokenArray, text: CountedText | None, position: int
    ) -> list[int]:
        """Keep the n-grams of a step; returns what the target said at each row, the text's first.

        before: the end of the text.  text: None = it is not known how the target draws.  position:
        output position of what is said behind the text."""
        assert rows.top is not None
        paths = rows.paths(before, self._ngram - 1)
        depths = [0]
        for parent in rows.parents.tolist():
            depths.append(depths[parent + 1] + 1)
        likely = zip(rows.top.token_ids.tolist(), rows.top.logprobs.tolist(), strict=True)
        params = None if text is None else text.params
        said = [
            _drawn(token_ids, logprobs, params, position + depth)
            for depth, (token_ids, logprobs) in zip(depths, likely, strict=True)
        ]
        for path, token in zip(paths, said, strict=True):
            if len(path) == self._ngram - 1:
                self._put((*path, token))
        return said

    def _put(self, gram: Words) -> None:
        """Keep an n-gram after its first word, and after its first two."""
        for size in range(1, min(_MAX_KEY, len(gram) - 1) + 1):
            key, chain = gram[:size], (*gram[size:], SEPARATOR)
            chains = self._after.pop(key, {})
            self._after[key] = chains  # what is written stands last
            chains.pop(chain, None)
            chains[chain] = None
            if len(chains) > self._max_chains:
                del chains[next(iter(chains))]
            if len(self._after) > self._max_contexts:
                del self._after[next(iter(self._after))]

    def root(self, text: CountedText, position: int) -> Match:
        """After the last two words, or after the last one where those are not known."""
        for size in range(min(_MAX_KEY, len(text.tokens)), 0, -1):
            chains = self._after.get(tuple(text.tokens[-size:]))
            if chains is not None:
                weights = [_OLDER**age for age in range(len(chains))]
                # Deeper in a chain more of it has been right: that is evidence as `size` is.
                return Match([(chain, 0) for chain in reversed(chains)], weights, size)
        return Match((), (), 0)


@dataclass(slots=True, eq=False)
class LookaheadState(CountState):
    """guesses: the window, from the position guessed_at on.  drafted: those of the newest tree."""

    guesses: list[int] = field(default_factory=list)
    guessed_at: int = 0
    drafted: list[int] = field(default_factory=list)


class LookaheadDrafter(CountDrafter[LookaheadState]):
    """Drafts inside the target alone: nobody else sees what it says at its rows."""

    def __init__(self, context: DrafterContext, options: LookaheadOptions) -> None:
        ways, pool = native.fastest(GramPool, native.GramPool)
        super().__init__(context, options.min_survival, LookaheadState.opened_by, ways)
        host_of(context.target, context.name, "lookahead")
        self._options = options
        self._pools = Bounded(
            lambda: pool(options.max_contexts, options.max_chains, options.ngram),
            options.max_stores,
        )
        # How often a guess is right where those before it are.
        self._guess_rates: Bounded[HitRates] = Bounded(HitRates)
        self.wants = StepWants(num_top=_NUM_TOP)

    def read(self, rows: Sequence[StepRows]) -> None:
        """See `StepReader`: n-grams of all rows, and the next guesses of the window."""
        for each in rows:
            if each.top is None:
                continue
            state = self._requests.get(each.request_id, each.generation)
            pool = self._pools.of((each.tenant, each.task))
            end = each.first_position + each.num_context  # the first draft's position
            before = each.last_words(self._options.ngram - 1, None if state is None else state.text)
            if state is None:
                pool.keep(each, before, None, 0)
            else:
                said = pool.keep(each, before, state.counted, end - state.prompt_len)
                self._guess_on(state, each, end, said)

    def _source(self, state: LookaheadState) -> Any:
        return self._pools.of(state.circle)

    def _guess_on(self, state: LookaheadState, rows: StepRows, end: int, said: list[int]) -> None:
        """One Jacobi iteration: what the target said at each guess is the next guess behind it."""
        nodes = rows.token_ids[rows.num_context :].tolist()
        children = {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(rows.parents.tolist(), nodes, strict=True))
        }
        guesses = state.guesses if state.guessed_at == end else []
        node, seen = -1, [said[0]]
        for guess in guesses:
            found = children.get((node, guess))
            if found is None:
                break
            node = found
            seen.append(said[node + 1])
        # Guesses whose rows were not verified stay as they are.
        seen += guesses[len(seen) :]
        num_drawn = len(rows.path) + 1
        state.guesses = seen[num_drawn:]
        state.guessed_at = end + num_drawn

    def _room(self, state: LookaheadState, max_nodes: int) -> int:
        """All but those of the window, which takes at most half of them."""
        state.drafted = self._window(state, max_nodes // 2)
        return max_nodes - len(state.drafted)

    def _completed(
        self, state: LookaheadState, tree: TokenTree, survival: FloatArray
    ) -> tuple[TokenTree, FloatArray]:
        """With the window's guesses."""
        if not state.drafted:
            return tree, survival
        rate = self._guess_rates.of((state.task, state.params.temperature == 0.0)).rate(_GUESS)
        tree, found = with_chain(tree, survival.tolist(), state.drafted, rate)
        return tree, np.array(found, np.float32)

    def _window(self, state: LookaheadState, most: int) -> list[int]:
        """The guesses behind the text, made up to the window's length by repeating words of it: any
        words do to begin with."""
        size = min(self._options.window, most)
        if state.guessed_at != len(state.text):
            state.guesses, state.guessed_at = [], len(state.text)
        missing = self._options.window - len(state.guesses)
        if missing > 0:
            state.guesses += state.text.token_ids[-missing:].tolist()
        params, first = state.params, state.next_position
        useful: list[int] = []
        for place, token in enumerate(state.guesses[:size]):
            if not is_useful(params, first + place, token):
                break
            useful.append(token)
        return useful

    def _advance(self, state: LookaheadState, commit: Commit) -> None:
        if state.drafted and commit.base_len == len(state.text):
            rates = self._guess_rates.of((state.task, state.params.temperature == 0.0))
            for guess, token in zip(state.drafted, commit.token_ids.tolist(), strict=False):
                rates.record(_GUESS, hit=guess == token)
                if guess != token:
                    break
        state.drafted = []
        super()._advance(state, commit)


def with_chain(
    tree: TokenTree, survival: Sequence[float], chain: Sequence[int], rate: float
) -> tuple[TokenTree, list[float]]:
    """The tree with a chain behind the text, whose nodes are new where the tree has not got them.

    rate: probability that a new node is right where its parent is."""
    tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
    found = list(survival)
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))
    }
    node = -1
    for token in chain:
        child = children.get((node, token))
        if child is None:
            child = len(tokens)
            tokens.append(token)
            parents.append(node)
            found.append((found[node] if node >= 0 else 1.0) * rate)
        node = child
    return TokenTree.of(tokens, parents), found


def _drawn(
    token_ids: Sequence[int], logprobs: Sequence[float], params: SamplingParams | None,
    position: int,
) -> int:  # fmt: skip
    """The token that the target draws there, by its most probable ones; params: None = unknown."""
    if params is None or params.temperature == 0.0 or position < 0:
        return token_ids[0]
    temperature = divisor(params)
    scores = [
        logprob / temperature + gumbel_scalar(params.noise_key, position, token, params.stream)
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]
    return token_ids[int(np.argmax(scores))]
