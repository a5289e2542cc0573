"""Look-ups draft what a plain search finds, and learn from what became of it."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from cluster.core import FloatArray, SamplingParams, token_array
from cluster.draft.base import is_useful
from cluster.draft.native import lookups as native
from cluster.spec.noise import gumbel
from tests.support.choices import by_day
from tests.support.spec.trees import paths

Words = tuple[int, ...]
# What followed a context: strength of the match, tokens with their weights, trust in these.
Found = tuple[int, dict[int, float], float]


class Text:
    """known: what had followed at each node of the newest tree, by its path."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.counted = native.CountedText(sizes)
        self.tokens = []
        self.known = {}

    def set_law(self, seed: int) -> None:
        self.params = SamplingParams(
            temperature=(0.0, 0.02, 1.0)[seed % 3],
            seed=-seed,
            stream=seed % 5,
            max_tokens=200,
            min_tokens=20,
            stop_token_ids=(3, 7),
        )
        self.counted.set_law(self.params)


class Outputs:
    """What `native.PastOutputs` finds, by plain search."""

    def __init__(self, sizes: Sequence[int], max_tokens: int = 300) -> None:
        self.source = native.PastOutputs(sizes, max_tokens, 5)
        self.sizes, self.half = sizes, max_tokens // 2
        self.shelves = [[]]

    def learn(self, text: Text, random: np.random.Generator) -> None:
        tokens = text.tokens[-(random.integers(1, 15) ** 2) :]
        self.source.keep(token_array(tokens))
        kept = tokens[max(len(tokens) + 1 - self.half, 0) :]
        if kept and len(self.shelves[0]) + len(kept) + 1 > self.half:
            self.shelves = [[], self.shelves[0]]
        self.shelves[0] += [*kept, -1] if kept else []
        assert len(self.source) == sum(map(len, self.shelves)) <= 2 * self.half

    def look_up(self, text: Text, path: Words) -> Found:
        places = [*self.places(text.tokens)]
        lengths = [agreement(text.tokens, tokens[:at]) for tokens, at in places]
        longest, counts = max(lengths, default=0), dict[int, float]()
        for (tokens, at), length in zip(places, lengths, strict=True):
            *before, token = [*tokens, *path][at : at + len(path) + 1]
            if tuple(before) == path and token >= 0:
                counts[token] = counts.get(token, 0.0) + 0.5 ** (longest - length)
        return longest + len(path), counts, 0.4

    def places(self, end: list[int]) -> Iterator[tuple[list[int], int]]:
        """Where the text goes on: in itself, and apart from it in outputs."""
        for texts in ([end], self.shelves):
            for size in self.sizes:
                found = []
                for text in texts:
                    each = [
                        at for at in range(size, len(text)) if text[at - size : at] == end[-size:]
                    ]
                    found += [(text, at) for at in each[:-6:-1]]
                yield from found
                if found:
                    break


class Recycled:
    """What `native.Adjacency` finds; three words in place of two."""

    def __init__(self) -> None:
        self.source = native.Adjacency(60, 3)
        self.likely = {}

    def learn(self, text: Text, random: np.random.Generator) -> None:
        """From a step that verified a random tree behind the text."""
        nodes, before = words(random, random.integers(0, 6)), text.tokens[-3:]
        parents = [int(random.integers(-1, node)) if node else -1 for node in range(len(nodes))]
        top = np.array([random.permutation(12)[:4] for _ in (-1, *nodes)], np.int32)
        logprobs = np.sort(random.normal(-2, 1, top.shape).astype(np.float32))[:, ::-1]
        self.source.keep(*map(token_array, (before, nodes, parents)), top, logprobs)
        ends = [before]
        for parent, token in zip(parents, nodes, strict=True):
            ends.append([*ends[parent + 1], token][-3:])
        for end, *after in zip(ends, top.tolist(), logprobs.tolist(), strict=True):
            for start in range(len(end) - 1, -1, -1):
                self.likely.pop(tuple(end[start:]), None)
                self.likely[tuple(end[start:])] = [*zip(*after, strict=True)]
                if len(self.likely) > 60:
                    del self.likely[next(iter(self.likely))]
        assert len(self.source) == len(self.likely)

    def look_up(self, text: Text, path: Words) -> Found:
        end = (*text.tokens, *path)[-3:]
        for start in range(len(end)):
            if likely := self.likely.get(end[start:]):
                divisor = text.params.temperature or 0.5
                counts = {
                    each: np.exp((logprob - likely[0][1]) / divisor) for each, logprob in likely
                }
                return len(end) - start, counts, 1.0
        return 0, {}, 1.0


def words(random: np.random.Generator, count: Any) -> list[int]:
    """Few words, often the same ones."""
    return (random.zipf(1.6, count) % 12).tolist()


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of the last 32 tokens are the same."""
    most = min(len(one), len(other), 32)
    lengths = range(most, -1, -1)
    return next(n for n in lengths if one[len(one) - n :] == other[len(other) - n :])


def shares(
    params: SamplingParams, position: Any, counts: dict[int, float], rate: float, trust: float
) -> FloatArray:
    """The probability that each token is the target's; see native/grow.cpp.

    position: one, or int64[places, 1]."""
    values, total = np.array([*counts.values()]), sum(counts.values())
    if params.temperature == 0.0:
        return rate * values / total
    mass = max(0.95, rate)
    noise = gumbel(params.noise_key, position, np.array([*counts]), params.stream)
    scores = np.log(mass * values / total) + noise
    weights = np.exp(trust * (scores - scores.max(axis=-1, keepdims=True)))
    found = rate / mass * weights / weights.sum(axis=-1, keepdims=True)
    return found * np.exp((mass - 1.0) * np.exp(-scores))


def grown(text: Text, looked_up: Any, wish: native.Wish) -> dict[Words, float]:
    """The most likely paths, best first, with their survival."""
    tree = {}
    frontier = [(-1.0, 0, ())]
    discovered = 0
    while frontier and len(tree) <= wish.max_nodes:
        negative, _, path = heapq.heappop(frontier)
        tree[path] = -negative
        evidence, counts, trust = text.known[path] = looked_up.look_up(text, path)
        position, rate = wish.position + len(path), wish.rates.rate(evidence)
        found = shares(text.params, position, counts, rate, trust) if counts else ()
        for token, share in zip(counts, found, strict=True):
            if -negative * share >= 0.02 and is_useful(text.params, position, token):
                discovered += 1
                heapq.heappush(frontier, (negative * share, discovered, (*path, token)))
    del tree[()]
    return tree


def learn(text: Text, token_ids: Sequence[int], counts: FloatArray) -> None:
    """Enter the hits and misses of the newest tree into hits and trials."""
    path = ()
    for token in token_ids:
        evidence, known, _ = text.known.get(path, (0, {}, 0.0))
        if not known:
            break
        counts[:, min(evidence, 32)] += (token in known, 1.0)
        path = (*path, token)


@pytest.mark.parametrize("seed", range(by_day(1, 3)))
@pytest.mark.parametrize(
    ("sizes", "make"),
    [((8, 1), Outputs), ((5, 2), lambda sizes: Outputs(sizes, 0)), ((), lambda _: Recycled())],
)
def test_trees_and_lessons_are_those_of_a_plain_search(
    sizes: Sequence[int], make: Callable[[Any], Any], seed: int
):
    """While texts grow, are cut, and get other laws."""
    random, looked_up, rates = np.random.default_rng(seed), make(sizes), native.HitRates()
    texts, num_nodes = [Text(sizes) for _ in range(3)], 0
    for step in range(150):
        changes, expected = [], rates._counts.copy()
        for text in texts:
            length, added = len(text.tokens), words(random, random.integers(1, 5) if step else 30)
            kept = int(random.integers(0, length + 1)) if random.random() < 0.05 else length
            if not step or random.random() < 0.05:
                text.set_law(int(random.integers(0, 2**40)))
            learn(text, added if kept == length else (), expected)
            text.tokens[kept:], text.known = added, {}
            changes.append(
                native.Change(text.counted, rates, kept == length, kept, token_array(added))
            )
        native.advance(changes)
        np.testing.assert_array_equal(rates._counts, expected)
        wishes = [
            native.Wish(
                each.counted, looked_up.source, rates, len(each.tokens) // 2, random.integers(1, 25)
            )
            for each in texts
        ]
        found = native.grow(wishes, 0.02)
        for text, wish, (tree, survival) in zip(texts, wishes, found, strict=True):
            paths_found = grown(text, looked_up, wish)
            assert paths(tree) == [*paths_found]
            np.testing.assert_allclose(survival, [*paths_found.values()], rtol=1e-6)
            num_nodes += len(tree)
        for text in texts:
            looked_up.learn(text, random)
    assert num_nodes > 300


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("position", [-2, 0, 9])
def test_a_guess_is_the_targets_draw(temperature: float, position: int):
    random, text = np.random.default_rng(3), native.CountedText(())
    token_ids = random.integers(0, 999, (40, 8)).astype(np.int32)
    logprobs = np.sort(random.normal(-2, 1, (40, 8)).astype(np.float32))[:, ::-1]
    params = SamplingParams(temperature=temperature, seed=-5, stream=2)
    text.set_law(params)
    scores = logprobs / np.float64(temperature or 1.0)
    if temperature and position >= 0:
        places = np.arange(position, position + 40)[:, None]
        scores += gumbel(params.noise_key, places, token_ids, params.stream)
    drawn = token_ids[np.arange(40), scores.argmax(axis=1)]
    assert text.draws(position, token_ids, logprobs) == drawn.tolist()


def test_hit_rates_follow_experience_and_stay_inside_the_unit_interval():
    rates = native.HitRates()
    before = rates.rate(2)
    assert rates.rate(1) < before < rates.rate(8)
    for _ in range(5000):
        rates.record(2, hit=True)
        rates.record(3, hit=False)
    assert before < rates.rate(2) < 1.0
    assert 0.0 < rates.rate(3) < 0.1
    for _ in range(5000):
        rates.record(2, hit=False)
    assert rates.rate(2) < 0.1, "old experience fades"
