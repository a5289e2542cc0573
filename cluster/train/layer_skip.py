"""Searches the layers that a target can leave out when it drafts for itself.

Layers are dropped one after another, each time the one without which the rest agrees most with the
whole; then each dropped one is compared with its neighbours.  What is agreed with are the target's
own answers, as `cluster.train.chat_answers` draws them.  A set is worth what a chain of its drafts
would bring: tokens per step over what drafts and step cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np
import torch
import yaml
from tqdm import tqdm

from cluster.core import TokenTree, token_array
from cluster.engine.engine import Engine
from cluster.engine.first_layers import part_of
from cluster.engine.work import Work, run_alone
from cluster.errors import ConfigError
from cluster.models.made_for import MadeFor
from cluster.models.resolve import resolve
from cluster.records import frozen
from cluster.train.chat_answers import AnswerSettings, ChatModel
from cluster.train.chat_heads import target_of
from cluster.train.generate import GeneratedAnswer

# Chains of drafts are no longer than that.
_MAX_CHAIN = 8
# Sets that agree less are worth nothing, and neither is what they lead to.
_MIN_AGREEMENT = 0.3
_TIMED_STEPS = 9
# After the first round only so many layers are tried: those whose loss cost least in the last one.
_NUM_TRIED = 8


@frozen
class Found:
    """A set of layers that draft.

    agreement: share of the answers' places where their most probable token is the whole model's.
    cost: time of a draft over that of a plain step.
    """

    layers: tuple[int, ...]
    agreement: float
    cost: float

    @property
    def chain(self) -> tuple[float, int]:
        """(speed-up over plain decoding, drafts per step) of the best chain length, where each
        draft is accepted with the probability of the agreement."""
        return max(
            (sum(self.agreement**depth for depth in range(size + 1)) / (1 + size * self.cost), size)
            for size in range(1, _MAX_CHAIN + 1)
        )


Measure = Callable[[Sequence[int]], Found]


def search(num_layers: int, measure: Measure) -> list[Found]:
    """The best sets found, one for each number of dropped layers, and last the best of all after
    comparing its dropped layers with their neighbours."""
    kept = tried = tuple(range(num_layers))
    ranked: list[int] = []  # what is kept, the cheapest to lose first, as last seen
    rows: list[Found] = []
    with tqdm(total=num_layers - 1, unit="layer") as bar:
        while len(kept) > 1:
            found = {
                layer: measure(tuple(each for each in kept if each != layer)) for layer in tried
            }
            order = sorted(found, key=lambda layer: -found[layer].agreement)
            best = found[order[0]]
            rows.append(best)
            bar.update()
            if best.agreement < _MIN_AGREEMENT:
                break
            kept = best.layers
            ranked = [*order[1:], *(layer for layer in ranked if layer not in found)]
            tried = tuple(ranked[:_NUM_TRIED])
    best = max(rows, key=lambda row: row.chain)
    return [*rows, _refined(best, num_layers, measure)]


def _refined(best: Found, num_layers: int, measure: Measure) -> Found:
    """Exchange dropped layers with neighbours that are kept, as long as that gains."""
    for layer in range(num_layers):
        if layer in best.layers:
            continue
        neighbours = [each for each in (layer - 1, layer + 1) if each in best.layers]
        exchanged = (tuple(sorted({*best.layers, layer} - {each})) for each in neighbours)
        best = max([best, *map(measure, exchanged)], key=lambda row: row.agreement)
    return best


class Bench:
    """Measures parts of one target."""

    def __init__(self, source: str, num_tokens: int, seed: int) -> None:
        """num_tokens: of the answers that sets are compared on."""
        answering = AnswerSettings(
            conversations_per_shard=8,
            max_question_tokens=96,
            max_answer_tokens=192,
            follow_up_share=0.0,
        )
        chat = ChatModel.load(resolve(source), answering)
        self._whole = chat.engine
        if self.num_layers < 2:
            raise ConfigError(f"{source} has one layer, and can leave out none; give another model")
        generator = torch.Generator().manual_seed(seed)
        self.answers: list[GeneratedAnswer] = []
        while sum(len(each.token_ids) for each in self.answers) < num_tokens:
            self.answers += chat.answers(generator)
        layers = range(self.num_layers)
        whole_s, half_s = (_step_s(self._engine(each)) for each in (layers, layers[::2]))
        # Both are measured once, so that sets of one size cost the same whatever the machine does.
        self._layer_s = max(whole_s - half_s, 0.0) / (len(layers) - len(layers[::2]))
        self._whole_s = whole_s

    @property
    def num_layers(self) -> int:
        return len(self._whole.model.layers)

    def measure(self, layers: Sequence[int]) -> Found:
        """The worth of this set of layers."""
        engine = self._engine(layers)
        hits = [hit for answer in self.answers for hit in _hits(engine, answer)]
        dropped_s = self._layer_s * (self.num_layers - len(layers))
        return Found(tuple(layers), float(np.mean(hits)), 1.0 - dropped_s / self._whole_s)

    def _engine(self, layers: Sequence[int]) -> Engine:
        whole = self._whole.config
        pages = -(-whole.max_context_len // whole.page_size) + 2
        config = replace(whole, num_pages=pages, prefix_cache=False)
        return Engine(config, part_of(self._whole.model, layers))


def _hits(engine: Engine, answer: GeneratedAnswer) -> list[bool]:
    """Where the engine's most probable token is the whole model's, along the answer."""
    tree = TokenTree.chain(token_array(answer.token_ids[:-1]))
    logits = run_alone(engine, Work("answer", 0, answer.prompt, tree)).logits
    engine.release("answer")
    assert logits is not None, "the answers fit the context that they were drawn in"
    return list(logits.argmax(dim=-1).cpu().numpy() == answer.candidates[:, 0])


def _step_s(engine: Engine) -> float:
    """The median time of a decoding step of one sequence."""
    times: list[float] = []
    tokens = token_array(np.arange(64) % engine.vocab_size)
    engine.submit(Work("timed", 0, tokens))
    engine.step()
    for index in range(_TIMED_STEPS):
        started = time.perf_counter()
        engine.submit(Work("timed", 64 + index, tokens[:1]))
        engine.step()
        times.append(time.perf_counter() - started)
    engine.release("timed")
    return float(np.median(times))


def table(rows: Sequence[Found], num_layers: int) -> str:
    """The sets as a table, the greatest speed-up marked."""
    best = max(row.chain for row in rows)
    lines = ["skipped  agreement  cost  drafts  speed-up"]
    for row in rows:
        speed, size = row.chain
        mark = "  *" if row.chain == best else ""
        lines.append(
            f"{num_layers - len(row.layers):7}  {row.agreement:9.3f}  {row.cost:.2f}  {size:6}  "
            f"{speed:8.2f}{mark}"
        )
    return "\n".join(lines)


def as_yaml(found: Found, num_layers: int, made_for: MadeFor) -> str:
    """The drafter's part of a configuration."""
    skipped = [layer for layer in range(num_layers) if layer not in found.layers]
    options = {"skip_layers": skipped, "made_for": asdict(made_for)}
    return yaml.safe_dump({"kind": "layer_skip", "options": options})


def find_layer_skip(source: str, num_tokens: int, seed: int) -> tuple[str, str]:
    """Search; returns a report to read, and the best set as a drafter of a configuration."""
    bench = Bench(source, num_tokens, seed)
    num_layers = bench.num_layers
    rows = search(num_layers, bench.measure)
    sizes = sorted({max(num_layers * quarter // 4, 1) for quarter in (1, 2, 3)})
    exits = [bench.measure(range(size)) for size in sizes]
    report = (
        f"{table(rows, num_layers)}\n\nits first layers alone (early_exit), for comparison:\n"
        f"{table(exits, num_layers)}"
    )
    best = max(rows, key=lambda row: row.chain)
    return report, as_yaml(best, num_layers, target_of(source))
