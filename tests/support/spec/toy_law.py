"""A toy target whose law depends on the path, drafters for it, and the chi-squared judge.

Every seed is one request.  A rule emits the first tokens of each; the judge compares their joint
law with the target's own.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from cluster.core import SamplingParams, TokenTree
from cluster.spec.draw import DrawRows, begin_draw
from cluster.spec.noise import gumbel
from tests.support.spec import judge

VOCAB_SIZE = 4
NUM_TOKENS = 3
NUM_SEEDS = 4000

Context = tuple[int, ...]
CONTEXTS: list[Context] = [
    context
    for length in range(NUM_TOKENS)
    for context in itertools.product(range(VOCAB_SIZE), repeat=length)
]
_PLACES = {context: index for index, context in enumerate(CONTEXTS)}


@functools.cache
def logits_after(context: Context, *, who: int) -> np.ndarray:
    """float32[vocab]: who 0 is the target, others are drafters that half agree with it."""
    digits = [token + 1 for token in context]
    target = np.random.default_rng([7, *digits]).standard_normal(VOCAB_SIZE) * 1.5
    if who:
        target = target + np.random.default_rng([who, 99, *digits]).standard_normal(VOCAB_SIZE)
    return target.astype(np.float32)


@functools.cache
def law_after(context: Context, params: SamplingParams, *, who: int = 0) -> np.ndarray:
    """float64[vocab], by the definitions of temperature and top_p."""
    logits = logits_after(context, who=who).astype(np.float64)
    if params.temperature == 0:
        return np.eye(VOCAB_SIZE)[logits.argmax()]
    probs = np.exp((logits - logits.max()) / params.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs)
    above = np.cumsum(probs[order]) - probs[order]
    probs[order[above >= params.top_p]] = 0.0
    return probs / probs.sum()


@dataclass(frozen=True)
class World:
    """One setting for all seeds.

    draws: the product's draw for (seed, context), int32[seeds, contexts].
    noise: float32[seeds, positions, vocab], what coupled drafters know too.
    """

    params: SamplingParams
    draws: np.ndarray
    noise: np.ndarray

    def drawn(self, seed: int, context: Context) -> int:
        return int(self.draws[seed, _PLACES[context]])


def make_world(params: SamplingParams) -> World:
    """Draw for every seed and context with the product's own code, in one batch."""
    seeds = np.arange(NUM_SEEDS)
    rows = np.stack([logits_after(context, who=0) for context in CONTEXTS])
    positions = np.array([len(context) for context in CONTEXTS])
    drawn = begin_draw(
        torch.from_numpy(np.tile(rows, (NUM_SEEDS, 1))),
        DrawRows.of(
            [replace(params, seed=seed) for seed in seeds.tolist()], [positions] * NUM_SEEDS
        ),
    ).taken()
    noise = gumbel(seeds[:, None, None], np.arange(NUM_TOKENS)[:, None], np.arange(VOCAB_SIZE), 0)
    return World(params, drawn.reshape(NUM_SEEDS, len(CONTEXTS)), noise)


Drafter = Callable[[World, int, Context], TokenTree]


def coupled_tree(width: int, who: int = 1) -> Drafter:
    """The `width` best children by drafter's logits + T * noise at every node; 1 is a chain."""

    def propose(world: World, seed: int, context: Context) -> TokenTree:
        def children(path: Context) -> Iterable[int]:
            scores = logits_after(path, who=who)
            scores = scores + world.params.temperature * world.noise[seed, len(path)]
            return np.argsort(-scores)[:width].tolist()

        return grow(context, children)

    return propose


def noise_chaser(world: World, seed: int, context: Context) -> TokenTree:
    """An adversary: proposes what the noise favours, whatever the text."""
    return grow(context, lambda path: np.argsort(-world.noise[seed, len(path)])[:2].tolist())


def never_right(world: World, seed: int, context: Context) -> TokenTree:
    """An adversary: knows the target's draw and proposes everything else."""
    wrong = (world.drawn(seed, context) + 1) % VOCAB_SIZE
    return TokenTree.chain([wrong, wrong][: NUM_TOKENS - 1 - len(context)])


def grow(context: Context, children: Callable[[Context], Iterable[int]]) -> TokenTree:
    """The tree of all children down to the last context that the world has draws for."""
    paths, tokens, parents = [context], [], []
    for index in itertools.count():
        if index == len(paths):
            return TokenTree.of(tokens, parents)
        if len(paths[index]) < NUM_TOKENS - 1:
            for token in children(paths[index]):
                paths.append((*paths[index], token))
                tokens.append(token)
                parents.append(index - 1)
    raise AssertionError


def p_value(texts: Iterable[Context], params: SamplingParams) -> float:
    """Chi-squared test of the joint law of the first NUM_TOKENS tokens; rare cells are pooled."""
    cells = list(itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS))
    place = {cell: index for index, cell in enumerate(cells)}
    seen = np.zeros(len(cells))
    for text in texts:
        seen[place[text[:NUM_TOKENS]]] += 1
    law = np.array(
        [
            np.prod([law_after(cell[:k], params)[cell[k]] for k in range(NUM_TOKENS)])
            for cell in cells
        ]
    )
    return judge.p_value(seen, law * seen.sum())
