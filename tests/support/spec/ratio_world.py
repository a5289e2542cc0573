"""Texts written under the laws of `cluster.spec.rejection` by many seeds at once, and their judge.

The target's law depends on the token before, and so does the drafter's.  All seeds make their steps
side by side, each from its own place; the rules themselves are the product's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from cluster.spec.noise import gumbel
from cluster.spec.rejection import ACCEPTS, EMITS, try_in_turn, uniforms
from tests.support.spec import judge

# The judge convicts every wrong rule of its own tests with p < 1e-30.
NUM_SEEDS = 20_000
NUM_TOKENS = 6

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# The example on which a rule that is wrong in the usual ways gives 10.2 / 63.0 / 26.8 %.
TARGET, DRAFT = (0.1, 0.5, 0.4), (0.5, 0.4, 0.1)


def constant(law: Sequence[float]) -> Floats:
    """A law that is the same after every token: float64[vocab, vocab]."""
    return np.tile(np.array(law), (len(law), 1))


def hashed(vocab_size: int, seed: int) -> Floats:
    """A law after each token that looks random: float64[vocab, vocab]."""
    weights = np.exp(np.random.default_rng(seed).standard_normal((vocab_size, vocab_size)) * 1.2)
    return weights / weights.sum(-1, keepdims=True)


@dataclass(frozen=True, eq=False)
class World:
    """target, draft: by the token before, [vocab, vocab].  widths: the siblings at each depth.
    chosen: the depths at which they are the likeliest in place of drawn ones."""

    target: Floats
    draft: Floats
    widths: tuple[int, ...]
    chosen: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class Step:
    """One place of many steps: the seeds, this place's output position, the siblings there in their
    order, and the laws."""

    seeds: Ints
    position: Ints
    target: Floats
    draft: Floats | None
    token_ids: Ints

    def numbers(self) -> Floats:
        ranks = np.arange(self.token_ids.shape[1])
        return uniforms(ACCEPTS, self.seeds[:, None], 0, self.position[:, None], ranks)

    def emitted(self, law: Floats) -> Ints:
        """Draw one token per seed by the law: int64[seeds]."""
        return drawn(law, uniforms(EMITS, self.seeds, 0, self.position))


Rule = Callable[[Step], tuple[Ints, Ints]]  # -> the accepted sibling, -1 = none; else the token


def in_turn(step: Step) -> tuple[Ints, Ints]:
    """The product's rule for siblings."""
    accepted, rest = try_in_turn(step.target, step.draft, step.token_ids, step.numbers())
    return accepted, step.emitted(rest)


def drawn(law: Floats, numbers: Floats) -> Ints:
    found = (law.cumsum(-1) <= numbers[:, None] * law.sum(-1, keepdims=True)).sum(-1)
    return np.minimum(found, law.shape[1] - 1)


def draft_keys(seeds: Ints) -> npt.NDArray[np.uint64]:
    """A seed of the drafter's own for each seed."""
    keys = [blake2b(int(seed).to_bytes(8, "little"), digest_size=8).digest() for seed in seeds]
    return np.frombuffer(b"".join(keys), dtype="<u8")


@dataclass(eq=False)
class Texts:
    """tokens: int64[seeds, places].  lens: tokens of each text.  accepted: drafts kept in each of
    all steps, one array of counts per round."""

    tokens: Ints
    lens: Ints
    accepted: list[Ints] = field(default_factory=list)

    @property
    def judged(self) -> Ints:
        """The tokens that all texts have."""
        return self.tokens[:, :NUM_TOKENS]


def written(
    world: World,
    rule: Rule = in_turn,
    *,
    drafts_by_step: bool = False,
    shared_noise: bool = False,
) -> Texts:
    """Write texts of NUM_TOKENS tokens in steps.

    drafts_by_step: drafts at one place differ from step to step; otherwise a place that is drafted
    again under the same text gets the same drafts, as in a tree that is re-rooted.
    shared_noise: the drafter knows the request's seed.
    """
    seeds = np.arange(NUM_SEEDS)
    keys = seeds.astype(np.uint64) if shared_noise else draft_keys(seeds)
    room = NUM_TOKENS + len(world.widths) + 1
    texts = Texts(np.zeros((NUM_SEEDS, room), np.int64), np.zeros(NUM_SEEDS, np.int64))
    while len(active := np.flatnonzero(texts.lens < NUM_TOKENS)):
        step = _Round(world, texts, active, keys, drafts_by_step)
        texts.accepted.append(step.in_turn(rule))
    return texts


class _Round:
    """One step of all texts that are not long enough; row i is that of text active[i]."""

    def __init__(
        self,
        world: World,
        texts: Texts,
        active: Ints,
        keys: npt.NDArray[np.uint64],
        drafts_by_step: bool,
    ) -> None:
        self._world, self._texts, self._active = world, texts, active
        self._root = texts.lens[active]
        self._stream = self._root if drafts_by_step else np.zeros_like(self._root)
        self._keys = keys[active]
        before = texts.tokens[active, np.maximum(self._root - 1, 0)]
        self._last = np.where(self._root > 0, before, 0)

    def _place(self, depth: int, rows: Ints, last: Ints) -> Step:
        position = self._root[rows] + depth
        target, draft = self._world.target[last], self._world.draft[last]
        width = self._world.widths[depth] if depth < len(self._world.widths) else 0
        with np.errstate(divide="ignore"):
            scores = np.log(draft)
        if depth not in self._world.chosen:
            tokens = np.arange(draft.shape[1])
            scores = scores + gumbel(
                self._keys[rows, None], position[:, None], tokens, self._stream[rows, None]
            )
        token_ids = np.argsort(-scores, axis=1, kind="stable")[:, :width]
        law = None if depth in self._world.chosen else draft
        return Step(self._active[rows], position, target, law, token_ids)

    def in_turn(self, rule: Rule) -> Ints:
        rows, last = np.arange(len(self._active)), self._last
        num_kept = np.zeros(len(rows), np.int64)
        for depth in range(len(self._world.widths) + 1):
            step = self._place(depth, rows, last)
            if depth == len(self._world.widths):
                self._append(rows, step.emitted(step.target))
                break
            accepted, token = rule(step)
            is_kept = accepted >= 0
            kept = np.take_along_axis(step.token_ids, np.maximum(accepted, 0)[:, None], 1)
            token = np.where(is_kept, kept[:, 0], token)
            self._append(rows, token)
            num_kept[rows] += is_kept
            rows, last = rows[is_kept], token[is_kept]
        return num_kept

    def _append(self, rows: Ints, token: Ints) -> None:
        texts, own = self._texts, self._active[rows]
        texts.tokens[own, texts.lens[own]] = token
        texts.lens[own] += 1


def p_value(target: Floats, tokens: Ints) -> float:
    """Chi-squared test of the joint law of texts, int64[texts, places]; rare cells are pooled.

    target: the law after each token, the first for the beginning.
    """
    num_texts, num_tokens = tokens.shape
    shape = (len(target),) * num_tokens
    seen = np.bincount(np.ravel_multi_index(tuple(tokens.T), shape), minlength=int(np.prod(shape)))
    law = target[0]
    for _ in range(num_tokens - 1):
        law = (law[..., None] * target).reshape(*law.shape, len(target))
    return judge.p_value(seen, law.ravel() * num_texts)


def uniforms_of(step: Step, use: int) -> Floats:
    """Numbers that no rule of the product uses: float64[seeds]."""
    return uniforms(use, step.seeds, 1, step.position)
