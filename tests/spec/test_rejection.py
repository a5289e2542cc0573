"""The textbook's laws: what is emitted follows the target's law, and acceptance is as in theory.

The negative controls break one condition each, on the same drafts and before the same judge, which
must convict every one of them.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import TokenTree
from cluster.requests.fields import DraftLaw
from cluster.spec.noise import gumbel
from cluster.spec.rejection import draw_from, try_in_turn, walk_in_turn
from tests.support.choices import by_day
from tests.support.spec.ratio_world import (
    DRAFT,
    NUM_TOKENS,
    TARGET,
    Floats,
    Ints,
    Rule,
    Step,
    World,
    constant,
    draft_keys,
    hashed,
    in_turn,
    p_value,
    uniforms_of,
    written,
)

PASS, CONVICT = 1e-3, 1e-6

PAIR = World(constant(TARGET), constant(DRAFT), (1, 1, 1))
TOY = World(hashed(4, 1), hashed(4, 2), (1, 1))


def without(law: Floats, token: int) -> Floats:
    cut = law.copy()
    cut[:, token] = 0.0
    return cut / cut.sum(-1, keepdims=True)


WORLDS = {
    "chain": PAIR,
    "chain, toy": TOY,
    "two siblings": replace(PAIR, widths=(2, 1)),
    "two siblings, toy": replace(TOY, widths=(2, 2)),
    "three siblings": replace(TOY, widths=(3, 3)),
    "all siblings": replace(PAIR, widths=(3, 3)),
    "chosen": replace(TOY, widths=(2, 1), chosen=frozenset({0, 1})),
    "mixed": replace(TOY, widths=(2, 2, 1), chosen=frozenset({1})),
    "top_p": replace(PAIR, target=without(PAIR.target, 0), widths=(2, 1)),
    "the drafter is the target": replace(TOY, draft=TOY.target, widths=(2, 1)),
    "one token": replace(PAIR, draft=constant((0.0, 1.0, 0.0)), widths=(1, 1)),
    "none of the drafter's tokens": replace(
        PAIR, target=constant((0.7, 0.3, 0.0)), draft=constant((0.0, 0.0, 1.0)), widths=(2, 1)
    ),
}


# By day one of chains, of siblings, of chosen ones, and the laws at the edges.
BY_DAY = ["chain", "two siblings, toy", "mixed", "top_p", "none of the drafter's tokens"]


@pytest.mark.parametrize("name", by_day(BY_DAY, [*WORLDS]))
@pytest.mark.parametrize("drafts_by_step", by_day([False], [False, True]), ids=str)
def test_siblings_in_turn_leave_the_targets_law(name: str, drafts_by_step: bool):
    texts = written(WORLDS[name], drafts_by_step=drafts_by_step)

    assert p_value(WORLDS[name].target, texts.judged) > PASS


def pruned_by_rank(step: Step) -> tuple[Ints, Ints]:
    """The last siblings are cut off at some places, whatever they are."""
    is_cut = uniforms_of(step, 7) < 0.5
    few = replace(step, token_ids=step.token_ids[:, :1])
    (accepted, token), (alone, other) = in_turn(step), in_turn(few)
    return np.where(is_cut, alone, accepted), np.where(is_cut, other, token)


def test_siblings_may_be_cut_off_by_their_rank():
    world = replace(TOY, widths=(2, 2))

    assert p_value(world.target, written(world, pruned_by_rank).judged) > PASS


# ---- The same rules over trees and a whole vocabulary


@dataclass(frozen=True)
class Drafted:
    """paths: the tokens before each place, the context's first."""

    tree: TokenTree
    laws: dict[int, DraftLaw]
    paths: list[list[int]]


def tree_of(world: World, seed: int, text: list[int], num_nodes: int) -> Drafted:
    """Draft as the world does: all siblings of the world's widths under every node."""
    paths: list[list[int]] = [[]]
    parents = []
    laws = {}
    for node in range(num_nodes):
        depth = len(paths[node])
        if depth == len(world.widths):
            break
        law = world.draft[[*text, *paths[node]][-1] if text or depth else 0]
        scores, tokens = np.log(law), np.arange(len(law))
        if depth not in world.chosen:
            key = int(draft_keys(np.array([seed]))[0])
            scores = scores + gumbel(key, len(text) + depth, tokens)
            laws[node - 1] = DraftLaw(tokens, law)
        for token in np.argsort(-scores, kind="stable")[: world.widths[depth]].tolist():
            parents.append(node - 1)
            paths.append([*paths[node], token])
    tree = TokenTree.of([path[-1] for path in paths[1:]], parents)
    return Drafted(tree, laws, [[*text, *path] for path in paths])


@pytest.mark.parametrize("name", ["chain, toy", "two siblings, toy", "chosen", "mixed"])
def test_a_walk_down_a_tree_makes_the_same_texts(name: str):
    world = WORLDS[name]
    texts = written(world)

    for seed in range(100):
        text = []
        while len(text) < NUM_TOKENS:
            drafted = tree_of(world, seed, text, 20)

            def law_of(node: int, paths: list[list[int]] = drafted.paths) -> Floats:
                return world.target[paths[node + 1][-1] if paths[node + 1] else 0]

            path, token_ids = walk_in_turn(drafted.tree, drafted.laws, law_of, (seed, 0, len(text)))
            assert token_ids[:-1].tolist() == drafted.tree.token_ids[path].tolist()
            text += token_ids.tolist()
        assert text == texts.tokens[seed, : texts.lens[seed]].tolist()


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=600).filter(lambda all_: sum(all_) > 0.01),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_a_token_is_drawn_where_the_running_sum_exceeds_the_number(
    weights: list[float], number: float
):
    token = draw_from(np.array(weights), number)

    below, limit = sum(weights[:token]), number * sum(weights)
    assert weights[token] > 0.0
    assert below - 1e-9 <= limit <= below + weights[token] + 1e-9


# ---- Acceptance


def mean_and_error(counts: Ints) -> tuple[float, float]:
    return float(counts.mean()), float(counts.std() / np.sqrt(len(counts)))


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_a_chain_is_accepted_as_often_as_theory_says(num_drafts: int):
    alpha = float(np.minimum(TARGET, DRAFT).sum())
    texts = written(replace(PAIR, widths=(1,) * num_drafts))

    mean, error = mean_and_error(texts.accepted[0])

    theory = (1.0 - alpha ** (num_drafts + 1)) / (1.0 - alpha)
    assert abs(1.0 + mean - theory) < 2.0 * error


# ---- Rules that break a condition


def residual_with_the_shared_noise(step: Step) -> tuple[Ints, Ints]:
    """Wrong: what is emitted is drawn with the noise that already chose the draft."""
    accepted, rest = try_in_turn(step.target, step.draft, step.token_ids, step.numbers())
    noise = gumbel(step.seeds[:, None], step.position[:, None], np.arange(rest.shape[1]))
    return accepted, (np.log(np.maximum(rest, 1e-300)) + noise).argmax(1)


def residual_by_the_deciding_number(step: Step) -> tuple[Ints, Ints]:
    """Wrong: a number that has rejected a draft is large."""
    numbers = step.numbers()
    accepted, rest = try_in_turn(step.target, step.draft, step.token_ids, numbers)
    found = (rest.cumsum(-1) <= numbers[:, :1]).sum(-1)
    return accepted, np.minimum(found, rest.shape[1] - 1)


def same_law_for_every_sibling(step: Step) -> tuple[Ints, Ints]:
    """Wrong: a second sibling is not drawn from the law that the first one came from."""
    accepted = np.full(len(step.seeds), -1)
    rest, numbers = step.target, step.numbers()
    for rank in range(step.token_ids.shape[1]):
        one = slice(rank, rank + 1)
        passes, left = try_in_turn(rest, step.draft, step.token_ids[:, one], numbers[:, one])
        is_open = accepted < 0
        rest = np.where(is_open[:, None], left, rest)
        accepted = np.where(is_open & (passes >= 0), rank, accepted)
    return accepted, step.emitted(rest)


def pruned_by_token(step: Step) -> tuple[Ints, Ints]:
    """Wrong: token 0 ends a text, so its node would save no step; it is left out of the tree."""
    is_left_out = step.token_ids[:, 0] == 0
    accepted, token = in_turn(step)
    return np.where(is_left_out, -1, accepted), np.where(
        is_left_out, step.emitted(step.target), token
    )


def repeated_draft_left_out(step: Step) -> tuple[Ints, Ints]:
    """Wrong for independent siblings: the same token again has to be tried again."""
    again = drawn_again(step)
    token_ids = np.stack((step.token_ids[:, 0], again), 1)
    accepted, once = same_law_for_every_sibling(replace(step, token_ids=token_ids[:, :1]))
    second, twice = same_law_for_every_sibling(replace(step, token_ids=token_ids))
    is_repeated = again == token_ids[:, 0]
    token = np.where(is_repeated, once, twice)
    # An accepted second sibling is emitted like any other token.
    token = np.where(~is_repeated & (second == 1), again, token)
    return np.where(is_repeated, accepted, np.where(second == 0, 0, -1)), token


def drawn_again(step: Step) -> Ints:
    return (step.draft.cumsum(-1) <= uniforms_of(step, 3)[:, None]).sum(-1)


def greedy_acceptance(step: Step) -> tuple[Ints, Ints]:
    """Wrong at T > 0: the draft passes whenever it is the target's most probable token."""
    passes = step.token_ids[:, 0] == step.target.argmax(1)
    return np.where(passes, 0, -1), step.emitted(step.target)


def rounded_law(step: Step) -> tuple[Ints, Ints]:
    """Wrong: the law is rounded after the drafts were drawn."""
    rounded = np.maximum(np.round(step.draft * 8.0), 1.0)
    return in_turn(replace(step, draft=rounded / rounded.sum(-1, keepdims=True)))


SIBLINGS = replace(PAIR, widths=(2, 2))
RULES: list[tuple[Rule, World]] = [
    (residual_by_the_deciding_number, PAIR),
    (same_law_for_every_sibling, SIBLINGS),
    (pruned_by_token, PAIR),
    (repeated_draft_left_out, PAIR),
    (greedy_acceptance, PAIR),
    (rounded_law, PAIR),
]


@pytest.mark.parametrize(("rule", "world"), RULES, ids=[rule.__name__ for rule, _ in RULES])
def test_the_judge_convicts_wrong_rules(rule: Rule, world: World):
    assert p_value(world.target, written(world, rule).judged) < CONVICT


def test_the_judge_convicts_a_drafter_that_knows_the_targets_noise():
    texts = written(PAIR, residual_with_the_shared_noise, shared_noise=True)

    assert p_value(PAIR.target, texts.judged) < CONVICT
