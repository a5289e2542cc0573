"""The law: what is emitted follows the target's law, with any drafter and any tree.

The negative controls apply wrong rules, each one seen in public code, to the same drafts and the
same judge; the judge must convict every one of them.
"""

from collections.abc import Callable

import numpy as np
import pytest

from cluster.core import EMPTY_TOKENS, EMPTY_TREE, SamplingParams, TokenTree
from cluster.spec.native.trees import Held, merge_trees
from cluster.spec.survival import Calibrator
from cluster.spec.tree import prune, reroot, walk_draws
from tests.support.choices import by_day
from tests.support.spec.toy_law import (
    NUM_SEEDS,
    NUM_TOKENS,
    VOCAB_SIZE,
    Context,
    Drafter,
    World,
    coupled_tree,
    grow,
    law_after,
    logits_after,
    make_world,
    never_right,
    noise_chaser,
    p_value,
)

PASS, CONVICT = 1e-3, 1e-6
Floats = np.ndarray

SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "T0.7": SamplingParams(temperature=0.7),
    "T1": SamplingParams(temperature=1.0),
    "T1 top_p 0.8": SamplingParams(temperature=1.0, top_p=0.8),
}


@pytest.fixture(scope="module", params=by_day(["T1 top_p 0.8"], [*SETTINGS]))
def world(request: pytest.FixtureRequest) -> World:
    return make_world(SETTINGS[request.param])


@pytest.fixture(scope="module")
def hot_world() -> World:
    return make_world(SETTINGS["T1"])


def no_tree(world: World, seed: int, context: Context) -> TokenTree:
    return EMPTY_TREE


def merged_trees(world: World, seed: int, context: Context) -> TokenTree:
    trees = [
        coupled_tree(1)(world, seed, context),
        coupled_tree(2, who=2)(world, seed, context),
        noise_chaser(world, seed, context),
    ]
    ones = [np.ones(len(tree), np.float32) for tree in trees]
    batch = [
        Held(0, tree, values, values, Calibrator(), EMPTY_TOKENS)
        for tree, values in zip(trees, ones, strict=True)
    ]
    return merge_trees(batch, 1).merged.split()[0]


def pruned_tree(world: World, seed: int, context: Context) -> TokenTree:
    # Pruned by the noise itself: even what is cut away may know everything.
    tree = coupled_tree(3)(world, seed, context)
    survival = np.random.default_rng(seed).random(len(tree)).astype(np.float32)
    return prune(tree, survival, 3)[0]


def stale_tree(world: World, seed: int, context: Context) -> TokenTree:
    """Proposed at the start of the text and only re-rooted since."""
    return reroot(coupled_tree(2)(world, seed, ()), context).tree


def random_drafts(world: World, seed: int, context: Context) -> TokenTree:
    generator = np.random.default_rng([seed, len(context)])
    return grow(context, lambda path: generator.permutation(VOCAB_SIZE)[:2].tolist())


DRAFTERS: dict[str, Drafter] = {
    "none": no_tree,
    "chain": coupled_tree(1),
    "tree": coupled_tree(2),
    "full tree": coupled_tree(VOCAB_SIZE),
    "merged": merged_trees,
    "pruned": pruned_tree,
    "stale": stale_tree,
    "random": random_drafts,
    "noise chaser": noise_chaser,
    "never right": never_right,
}


def one_round(world: World, drafter: Drafter, seed: int, text: Context) -> Context:
    """The product's round: propose, draw at every node, walk.  Returns what it emits."""
    tree = drafter(world, seed, text)
    contexts = [text]
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        contexts.append((*contexts[parent + 1], token))
    draws = np.array([world.drawn(seed, context) for context in contexts], np.int32)
    return tuple(walk_draws(tree, draws)[1].tolist())


def speculate(world: World, drafter: Drafter, seed: int) -> Context:
    """Rounds until the text is long enough."""
    text = ()
    while len(text) < NUM_TOKENS:
        text = (*text, *one_round(world, drafter, seed, text))
    return text


@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_the_emitted_law_is_the_targets_and_texts_are_those_of_plain_decoding(
    world: World, drafter: str
):
    texts = [speculate(world, DRAFTERS[drafter], seed) for seed in range(NUM_SEEDS)]

    assert p_value(texts, world.params) > PASS
    for seed in range(0, NUM_SEEDS, 10):
        plain = speculate(world, no_tree, seed)
        assert texts[seed][:NUM_TOKENS] == plain[:NUM_TOKENS]


def test_coupled_drafts_are_accepted_often_so_acceptance_itself_is_judged(
    hot_world: World,
):
    lengths = [len(one_round(hot_world, coupled_tree(2), seed, ())) for seed in range(500)]

    assert float(np.mean(lengths)) > 2.0


# ---- Wrong rules for chains; those of the ratio tests are in `test_rejection`.

Rule = Callable[[World, int, Context, np.random.Generator], int]


def chain_of(world: World, rule: Rule) -> list[Context]:
    """Texts of a rule that emits one token per context, given a coupled draft for it."""
    texts = []
    for seed in range(NUM_SEEDS):
        generator = np.random.default_rng([seed, 11])
        text = ()
        while len(text) < NUM_TOKENS:
            text = (*text, rule(world, seed, text, generator))
        texts.append(text)
    return texts


def both_laws(world: World, text: Context) -> tuple[Floats, Floats]:
    return law_after(text, world.params), law_after(text, world.params, who=1)


def one_noise_for_all_levels(
    world: World, seed: int, text: Context, generator: np.random.Generator
) -> int:
    """Wrong: every level of the step is drawn with the noise of its root."""
    return int((logits_after(text, who=0) + world.noise[seed, 0]).argmax())


def accepts_any_coupled_sibling(
    world: World, seed: int, text: Context, generator: np.random.Generator
) -> int:
    """Wrong: of two siblings the first with p >= q passes, though order depends on the draws."""
    target, draft = both_laws(world, text)
    scores = logits_after(text, who=1) + world.noise[seed, len(text)]
    for token in np.argsort(-scores)[:2].tolist():
        if target[token] >= draft[token]:
            return int(token)
    return int(generator.choice(VOCAB_SIZE, p=target))


WRONG_RULES: dict[str, Rule] = {
    "one noise": one_noise_for_all_levels,
    "any sibling": accepts_any_coupled_sibling,
}


@pytest.mark.parametrize("rule", WRONG_RULES.values(), ids=WRONG_RULES)
def test_the_judge_convicts_wrong_rules(hot_world: World, rule: Rule):
    texts = chain_of(hot_world, rule)

    assert p_value(texts, hot_world.params) < CONVICT
