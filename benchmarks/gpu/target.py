"""A target and a head in it, driven as a worker drives them: drafts, one step, draws, walk.

No coordinator, threads or network.  Here the head drafts between two steps, in the product partly
during a step, so drafting and the step with its draws are timed apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from benchmarks.gpu.model import load_random, read_bytes, write_head, write_target
from benchmarks.gpu.part import Row, Setting
from cluster.config.schema import (
    Config,
    DrafterConfig,
    DrafterPlacement,
    EngineConfig,
    TargetConfig,
)
from cluster.core import EMPTY_TREE, Commit, SamplingParams, TokenTree, token_array
from cluster.draft import registry
from cluster.draft.base import DrafterContext, DraftTask
from cluster.draft.host import Host, layers_of
from cluster.draft.inside import StepWants
from cluster.engine.engine import Engine
from cluster.engine.work import Output, Work
from cluster.spec.token_log import prefix_hash
from cluster.worker.texts import TargetText, measured_text
from cluster.worker.verifier import Verifier

GREEDY = SamplingParams(temperature=0.0, max_tokens=4096)
_HEAD = "head"
_MAX_NODES = 64
# Kernels are compiled, caches filled and clocks raised.
_WARM_UP_ROUNDS = 4
# Slices of growth per round: enough for the deepest tree, one level at a time.
_MAX_SLICES = 24
# Above whatever a model's logits are.
_CERTAIN = 1e4


class AgreeingEngine:
    """An engine whose model likes the drafts: from the root on it takes the first child of a node
    with a probability of `agreement`, by that child's logit, which is raised.

    Random weights agree with nothing; so rounds are as long and as costly as with trained ones."""

    def __init__(self, engine: Engine, agreement: float) -> None:
        self._engine = engine
        self._agreement = agreement
        self._generator = np.random.default_rng(0)
        self._trees: dict[str, TokenTree] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, work: Work) -> None:
        self._trees[work.request_id] = work.tree
        self._engine.submit(work)

    def step(self, taps: Sequence[int] = ()) -> list[Output]:
        outputs = self._engine.step(taps)
        for output in outputs:
            tree = self._trees[output.request_id]
            path = [] if output.logits is None else self._path(tree)
            if path:
                # The root's row comes first, then each node's.
                rows = torch.tensor([0, *(node + 1 for node in path[:-1])])
                tokens = torch.from_numpy(tree.token_ids[path].astype(np.int64))
                with torch.inference_mode():
                    output.logits[rows, tokens] = _CERTAIN
        return outputs

    def _path(self, tree: TokenTree) -> list[int]:
        path: list[int] = []
        while self._generator.random() < self._agreement:
            children = np.flatnonzero(tree.parents == (path[-1] if path else -1))
            if not len(children):
                break
            path.append(int(children[0]))
        return path


@dataclass(slots=True)
class Times:
    """Of rounds, each with the whole batch.  draft_s, step_s, forward_s: of each; the step with
    its draws, its forward alone."""

    texts: list[list[int]] = field(default_factory=list)
    num_tokens: int = 0
    draft_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)

    def row(self) -> Row:
        draft_s, step_s, forward_s = self.draft_s, self.step_s, self.forward_s
        rounds_s = [sum(both) for both in zip(draft_s, step_s, strict=True)]
        outside = [each - forward for each, forward in zip(step_s, forward_s, strict=True)]
        return {
            "tokens_per_s": self.num_tokens / sum(rounds_s),
            "tokens_per_round": self.num_tokens / len(rounds_s) / len(self.texts),
            "round_ms": 1e3 * statistics.median(rounds_s),
            "draft_ms": 1e3 * statistics.median(draft_s),
            "forward_ms": 1e3 * statistics.median(forward_s),
            "outside_ms": 1e3 * statistics.median(outside),
        }


class Target:
    """config: of the engine, whose settings are the product's defaults but for what is given."""

    def __init__(
        self, setting: Setting, *, head: bool = False, agreement: float = 0.0, **settings: Any
    ) -> None:
        self.sizes, folder = setting.sizes, setting.folder / "target"
        write_target(folder, self.sizes)
        if setting.tiny:
            settings = {**settings, "max_running_sequences": 8, "num_pages": 512}
        self.config = EngineConfig(
            model=str(folder),
            device=str(setting.device),
            dtype=str(setting.dtype).removeprefix("torch."),
            prefix_cache=False,
            **settings,
        )
        self.model = load_random(self.sizes, self.config, setting.device)
        drafters = {}
        if head:
            write_head(setting.folder / _HEAD, self.sizes, setting.device)
            drafters[_HEAD] = DrafterConfig(
                kind="eagle3",
                options={"model": str(setting.folder / _HEAD)},
                placement=DrafterPlacement(with_="target"),
            )
        config = Config(target=TargetConfig(engine=self.config), drafters=drafters)
        extra = [
            layer for name in drafters for layer in layers_of(config, name, self.model.layers[0])
        ]
        self.engine = Engine(self.config, self.model, extra_layers=extra)
        self.drafter: Any = None
        wants = StepWants()
        if head:
            host = Host(self.engine, config, _HEAD)
            sequences, vocab_size = self.config.max_running_sequences, self.engine.vocab_size
            context = DrafterContext(_HEAD, _MAX_NODES, sequences, vocab_size, target=host)
            self.drafter = registry.create(_HEAD, config.drafters[_HEAD], context)
            wants = self.drafter.wants
        self.engine.capture_ahead(wants.taps)
        engine = AgreeingEngine(self.engine, agreement) if agreement else self.engine
        self._verifier = Verifier(cast("Engine", engine), wants=wants)
        self._num_texts = 0

    def fallbacks(self) -> Row:
        """What runs in a slower way than it should; a row of it is a failure."""
        found = self.engine.forward.fallbacks
        row: Row = {
            "attention": self.engine.forward.attention,
            "draws": self._verifier.drawn_by,
            "graphs": self.engine.uses_graphs,
            "kv_gb": sum(layer.nbytes for layer in self.engine.cache.layers) / 1e9,
        }
        return {**row, "failed": "; ".join(found)} if found else row

    def run(
        self,
        batch: int,
        prompt_len: int,
        rounds: int,
        *,
        nodes: int = 0,
        params: SamplingParams = GREEDY,
        mode: str = "graphs",
    ) -> Times:
        """Read prompts of random tokens, then decode; the first rounds do not count.

        mode: in CUDA graphs, eagerly, or ahead: each step begins before the tokens of the last one
        are known."""
        texts = [self._text(index, prompt_len, params) for index in range(batch)]
        graphs = self.engine.forward.graphs
        times, told = Times(), [0] * batch
        try:
            if mode == "eager":
                self.engine.forward.graphs = None
            self._step(texts, [EMPTY_TREE] * batch)
            for number in range(_WARM_UP_ROUNDS + rounds):
                begin = time.perf_counter()
                trees = self._drafts(texts, told, nodes) if nodes else [EMPTY_TREE] * batch
                drafted = time.perf_counter()
                num_tokens, forward_s = self._step(texts, trees, ahead=mode == "ahead")
                if number >= _WARM_UP_ROUNDS:
                    times.num_tokens += num_tokens
                    times.draft_s.append(drafted - begin)
                    times.step_s.append(time.perf_counter() - drafted)
                    times.forward_s.append(forward_s)
            times.texts = [text.tokens.token_ids[prompt_len:].tolist() for text in texts]
        finally:
            self.engine.forward.graphs = graphs
            names = [text.id for text in texts]
            self._verifier.release(names)
            if self.drafter is not None:
                self.drafter.release(names)
        return times

    def read_bytes(self, batch: int, num_tokens: int) -> int:
        """See `model.read_bytes`."""
        return read_bytes(self.model, batch * num_tokens)

    def _text(self, index: int, prompt_len: int, params: SamplingParams) -> TargetText:
        # The same prompts in every run.
        ids = np.random.default_rng(index).integers(0, self.sizes.vocab_size, prompt_len)
        self._num_texts += 1
        return measured_text(f"text {self._num_texts}", token_array(ids.tolist()), params)

    def _step(
        self, texts: Sequence[TargetText], trees: Sequence[TokenTree], *, ahead: bool = False
    ) -> tuple[int, float]:
        """Verify every text once: (emitted tokens, seconds of the forwards)."""
        waiting = {text.id: text for text in texts}
        begun = self._verifier.ahead
        asked = [each for each in zip(texts, trees, strict=True) if each[0] not in begun]
        refused = self._verifier.submit(asked)
        num_tokens, forward_s = 0, 0.0
        while waiting and not refused:
            answers = self._verifier.step(texts if ahead else ())
            refused |= answers.refused
            forward_s += answers.report.forward_time_s
            for verdict in answers.verdicts:
                waiting.pop(verdict.request_id).tokens.append(verdict.token_ids)
                num_tokens += len(verdict.token_ids)
            if answers.missed:
                raise RuntimeError(f"the pages do not suffice for {len(texts)} texts")
            if self.drafter is not None:
                self.drafter.read(self._verifier.last_rows)
        if refused:
            raise next(iter(refused.values()))
        return num_tokens, forward_s

    def _drafts(self, texts: Sequence[TargetText], told: list[int], nodes: int) -> list[TokenTree]:
        self.drafter.observe(
            [_commit(text, have, nodes) for text, have in zip(texts, told, strict=True)]
        )
        told[:] = [len(text.tokens) for text in texts]
        trees = {text.id: EMPTY_TREE for text in texts}
        tasks = [DraftTask(text.id, 1, nodes) for text in texts]
        for _ in range(_MAX_SLICES):
            proposals = self.drafter.propose(tasks)
            if not proposals:
                break
            trees |= {proposal.request_id: proposal.tree for proposal in proposals}
        return list(trees.values())


def _commit(text: TargetText, told: int, nodes: int) -> Commit:
    tokens = text.tokens.token_ids
    return Commit(
        text.id,
        generation=1,
        base_len=told,
        prefix_hash=prefix_hash(tokens[:told]),
        token_ids=tokens[told:],
        prompt_len=text.opened.prompt_len,
        max_nodes=nodes,
        params=text.params if told == 0 else None,
    )
