"""The plan of the runs: the server, the questions and their order in each.

A *run* is the life of one server, in which no question is asked twice: look-ups, prefix caches and
learned states know nothing of an answer before it is measured.  Ours answers, at each level of
concurrency, one group of questions with speculation and another one without; the next run swaps
the groups, so that every question is answered both ways.  A peer has one mode per server
and answers both groups in one run.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.spec_bench.questions import Question, rotated, share_out
from benchmarks.support.answers import Law
from cluster.records import frozen

OURS = "ours"
PLAIN = "ours, plain"

# Shares of the questions: n requests at a time need more than n questions, and a low level needs
# some of every category.
_LEAST_SHARE = 12


@frozen
class Block:
    """Questions that are asked `concurrency` at a time.  system: the system that they measure."""

    system: str
    concurrency: int
    questions: tuple[Question, ...]


@frozen
class Run:
    """One life of a server.  server: OURS, or the name of a peer.  seen: how often each block is
    asked before it is measured."""

    server: str
    law: Law
    index: int
    blocks: tuple[Block, ...]
    seen: int = 0

    @property
    def key(self) -> str:
        return f"{self.server}/{self.law.name}/{self.index}"


def plan(
    questions: Sequence[Question],
    laws: Sequence[Law],
    levels: Sequence[int],
    peers: Sequence[str],
    num_rounds: int,
    num_seen: int = 0,
) -> list[Run]:
    """Return all runs, ours and the peers' in turns.  Each round gives levels other questions."""
    runs = []
    for round_index in range(num_rounds):
        weights = [max(level + 1, _LEAST_SHARE) for level in levels for _ in range(2)]
        groups = share_out(rotated(questions, round_index / num_rounds), weights)
        pairs = list(zip(groups[::2], groups[1::2], strict=True))
        for law in laws:
            for swap in (False, True):
                index = 2 * round_index + swap
                runs.append(Run(OURS, law, index, _ours(pairs, levels, swap=swap), num_seen))
                # A peer's turn comes between ours, so that drift affects all equally.
                for peer in peers[swap::2]:
                    blocks = (
                        Block(peer, level, (*first, *second))
                        for level, (first, second) in zip(levels, pairs, strict=True)
                    )
                    runs.append(Run(peer, law, round_index, tuple(blocks), num_seen))
    return runs


def short_blocks(runs: Sequence[Run]) -> list[str]:
    """Messages for levels that have fewer questions than requests at a time."""
    least: dict[int, int] = {}
    for run in runs:
        for block in run.blocks:
            found = least.get(block.concurrency, len(block.questions))
            least[block.concurrency] = min(found, len(block.questions))
    return [
        f"{level} at a time: only {count} questions, so no more are under way; ask more questions"
        for level, count in least.items()
        if count < level
    ]


def _ours(
    pairs: Sequence[tuple[list[Question], list[Question]]], levels: Sequence[int], *, swap: bool
) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for place, (level, (first, second)) in enumerate(zip(levels, pairs, strict=True)):
        with_drafts, without = (second, first) if swap else (first, second)
        both = [Block(OURS, level, tuple(with_drafts)), Block(PLAIN, level, tuple(without))]
        # The order alternates, so that aftereffects (heat, page cache) favour neither.
        blocks += both if (place + swap) % 2 == 0 else both[::-1]
    return tuple(blocks)
