"""Plain and speculative decoding with the engine and the drafter called directly.

No coordinator, threads or network.  The engine's step with the draw and the drafting are timed
separately.  Here the drafter runs between two steps, in the product during a step.  So two speeds
are reported: with drafting in series, and without drafting time, an upper bound for any
overlap.  Greedy. A step with another number of rows rounds differently and may flip a near-tie, so
the report also has the share of tokens before the first difference from the plain text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cluster.core import EMPTY_TREE, Commit, DraftTask, SamplingParams, TokenTree, token_array
from cluster.draft.base import Drafter
from cluster.engine.engine import Engine
from cluster.engine.work import Work
from cluster.spec.token_log import prefix_hash
from cluster.spec.tree import walk_draws

# Warm-up: kernels are compiled, caches filled and clocks raised.
WARM_UP_ROUNDS = 4
# Slices of growth per round: enough for a tree of the largest size, one level at a time.
_MAX_SLICES = 24


@dataclass(slots=True)
class Run:
    """The times and texts of a run; every round had the whole batch."""

    texts: list[list[int]]
    num_tokens: int = 0
    rounds: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    step_times_s: list[float] = field(default_factory=list)


class Decoder:
    """Decodes a batch in lockstep; the drafter, if any, drafts between steps."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Sequence[int]], drafter: Drafter | None, nodes: int
    ) -> None:
        self._engine = engine
        self._drafter = drafter
        self._nodes = nodes
        self._names = [f"{nodes}-{index}" for index in range(len(prompts))]
        self._prompts = prompts
        self._tokens = [list(prompt) for prompt in prompts]
        self._held = [0] * len(prompts)
        self._told = [0] * len(prompts)

    def run(self, num_tokens: int) -> Run:
        """Run rounds until the first text has `num_tokens` tokens, then free all sequences."""
        self._round([EMPTY_TREE] * len(self._names))  # the prompts
        run = Run(texts=[])
        rounds = 0
        while max(map(len, self._texts())) < num_tokens:
            begin = time.perf_counter()
            trees = self._draft()
            drafted = time.perf_counter()
            emitted, step_s = self._round(trees)
            rounds += 1
            if rounds <= WARM_UP_ROUNDS:
                continue
            run.rounds += 1
            run.num_tokens += emitted
            run.draft_s += drafted - begin
            run.verify_s += time.perf_counter() - drafted
            run.step_times_s.append(step_s)
        run.texts = self._texts()
        for name in self._names:
            self._engine.release(name)
        if self._drafter is not None:
            self._drafter.release(self._names)
        return run

    def _texts(self) -> list[list[int]]:
        pairs = zip(self._tokens, self._prompts, strict=True)
        return [tokens[len(prompt) :] for tokens, prompt in pairs]

    def _round(self, trees: Sequence[TokenTree]) -> tuple[int, float]:
        """Verify every sequence once: (emitted tokens, seconds of the engine's steps)."""
        for index, name in enumerate(self._names):
            delta = token_array(self._tokens[index][self._held[index] :])
            self._engine.submit(Work(name, self._held[index], delta, trees[index]))
        answers: dict[str, torch.Tensor] = {}
        step_s = 0.0
        while self._engine.has_pending:
            for output in self._engine.step():
                assert output.logits is not None, f"the engine refused: {output}"
                answers[output.request_id] = output.logits
            step_s += self._engine.last_step.step_time_s
        # One transfer for all draws.
        draws = torch.cat([answers[name] for name in self._names]).argmax(dim=1).cpu().numpy()
        emitted = row = 0
        for index, (name, tree) in enumerate(zip(self._names, trees, strict=True)):
            path, token_ids = walk_draws(tree, draws[row : row + len(tree) + 1])
            row += len(tree) + 1
            self._engine.retain(name, path.tolist())
            self._held[index] = len(self._tokens[index]) + len(path)
            self._tokens[index] += token_ids.tolist()
            emitted += len(token_ids)
        return emitted, step_s

    def _draft(self) -> list[TokenTree]:
        if self._drafter is None:
            return [EMPTY_TREE] * len(self._names)
        self._drafter.observe([self._commit(index) for index in range(len(self._names))])
        trees = dict.fromkeys(self._names, EMPTY_TREE)
        tasks = [DraftTask(name, 1, self._nodes) for name in self._names]
        for _ in range(_MAX_SLICES):
            proposals = self._drafter.propose(tasks)
            if not proposals:
                break
            trees |= {proposal.request_id: proposal.tree for proposal in proposals}
        return list(trees.values())

    def _commit(self, index: int) -> Commit:
        tokens, told = self._tokens[index], self._told[index]
        self._told[index] = len(tokens)
        return Commit(
            self._names[index],
            generation=1,
            base_len=told,
            prefix_hash=prefix_hash(tokens[:told]),
            token_ids=token_array(tokens[told:]),
            prompt_len=len(self._prompts[index]),
            max_nodes=self._nodes,
            params=SamplingParams(temperature=0.0) if told == 0 else None,
        )


def speculative_row(run: Run, plain: Run, nodes: int) -> dict[str, Any]:
    """The figures of a speculative run, compared with the plain run of the same batch."""
    plain_speed = plain.num_tokens / plain.verify_s
    in_series = run.num_tokens / (run.verify_s + run.draft_s)
    free = run.num_tokens / run.verify_s
    batch = len(run.texts)
    return {
        "nodes": nodes,
        "tokens_per_round": run.num_tokens / run.rounds / batch,
        "draft_ms": 1000 * run.draft_s / run.rounds,
        "verify_ms": 1000 * run.verify_s / run.rounds,
        "tokens_per_s_in_series": in_series,
        "tokens_per_s_drafts_free": free,
        "ratio_in_series": in_series / plain_speed,
        "ratio_drafts_free": free / plain_speed,
        "tokens_equal_to_plain": _equal_share(run.texts, plain.texts),
    }


def _equal_share(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """The share of tokens before the first difference of the two texts."""
    equal = compared = 0
    for own, other in zip(found, expected, strict=True):
        length = min(len(own), len(other))
        compared += length
        differing = (at for at in range(length) if own[at] != other[at])
        equal += next(differing, length)
    return equal / compared
