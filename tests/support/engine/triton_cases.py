"""Attention problems for the Triton kernels, small enough for their interpreter."""

from functools import partial

import numpy as np
import torch

from cluster.core import EMPTY_TREE, SamplingParams, TokenTree, token_array
from cluster.engine.attention.seam import AttentionBackend
from cluster.engine.memory.sequence import Sequence
from cluster.engine.schedule.batch import Batch, Pick, build_batch
from cluster.engine.types import AttentionOptions
from cluster.engine.work import Work
from cluster.records import frozen, record
from cluster.spec.draw import DrawRows, FusedDraw, begin_draw
from tests.support.choices import by_day
from tests.support.engine.driver import random_tree

NUM_SLOTS, PAGE_SIZE = 8192, 16
SCRATCH_SLOT = NUM_SLOTS - PAGE_SIZE


@record
class Case:
    """One call of `attend`.  num_programs: 1 leaves no tile split."""

    batch: Batch
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    num_programs: int = 1

    def query(self) -> torch.Tensor:
        shape = (self.heads, self.batch.num_rows, self.head_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(self.dtype)

    def kv(self) -> torch.Tensor:
        """One layer of a cache of several, as the engine has it: not contiguous."""
        shape = (NUM_SLOTS, 2, self.kv_heads, self.head_dim)
        values = torch.randn(shape, generator=torch.Generator().manual_seed(6)).to(self.dtype)
        # What no sequence owns is poison: a key read by mistake shows.
        owned = torch.zeros(NUM_SLOTS, dtype=torch.bool)
        owned[SCRATCH_SLOT] = True
        for share in self.batch.shares:
            owned[torch.from_numpy(share.slots)] = True
        values[~owned] = float("nan")
        return torch.stack((torch.zeros_like(values), values))[1]

    def options(self) -> AttentionOptions:
        sinks = torch.linspace(-1, 2, self.heads) if self.sinks else None
        return AttentionOptions(0.3, self.softcap, sinks)

    def attended(self, backend: AttentionBackend) -> torch.Tensor:
        """What a backend says."""
        plan = backend.plan(self.batch, SCRATCH_SLOT)
        return plan.attend(self.query(), self.kv(), self.window, self.options())


def lay_out(*specs: tuple[int, int, TokenTree, int], min_rows: int = 0) -> Batch:
    """specs: cached tokens, new tokens, tree, cached nodes; pages are scattered at random."""
    pages = iter(np.random.default_rng(3).permutation(SCRATCH_SLOT // PAGE_SIZE).tolist())
    picks = []
    for index, (cached, new, tree, num_cached_nodes) in enumerate(specs):
        sequence = Sequence(str(index), index, PAGE_SIZE)
        while sequence.num_pages * PAGE_SIZE < cached + new + len(tree):
            sequence.tables[0].add(next(pages))
        sequence.append(token_array([7] * cached))
        work = Work(str(index), cached, token_array([7] * new), tree, num_cached_nodes)
        sequence.work = work
        picks.append(Pick(sequence, work, new, completes=True))
    # The limit lies within the longest sequences: positions beyond it are cut off in the batch.
    return build_batch(picks, min_rows=min_rows, scratch_slot=SCRATCH_SLOT, max_context_len=550)


def tree_of_size(size: int) -> TokenTree:
    return random_tree(size, np.random.default_rng(size))


DECODING = lay_out((20, 1, EMPTY_TREE, 0), (275, 1, EMPTY_TREE, 0))
CHAIN = lay_out((70, 1, TokenTree.chain([4, 5, 6, 7, 8]), 0))
TREE = lay_out((270, 1, tree_of_size(9), 0))
LARGE_TREE = lay_out((530, 1, tree_of_size(40), 0))
GROWTH = lay_out((11, 0, tree_of_size(40), 35))
PROMPT = lay_out((0, 40, EMPTY_TREE, 0))
CHUNK = lay_out((250, 30, EMPTY_TREE, 0))
RAGGED = lay_out((3, 1, tree_of_size(5), 0), (290, 2, EMPTY_TREE, 0), (800, 0, tree_of_size(7), 3))
LONG = lay_out((5, 1, EMPTY_TREE, 0), (4400, 1, EMPTY_TREE, 0))
MIXED = lay_out((5, 40, tree_of_size(3), 0), (540, 1, tree_of_size(6), 0))
PADDED = lay_out((5, 1, tree_of_size(2), 0), (270, 1, EMPTY_TREE, 0), min_rows=21)

# So many that no item has more keys than it must; more would be idle items for the interpreter.
Split = partial(Case, num_programs=32)
CASES = {
    "decoding rows of several lengths": Case(DECODING),
    "decoding rows, keys split": Split(DECODING),
    "a chain": Case(CHAIN),
    "a tree": Case(TREE),
    "a tree, keys split": Split(TREE),
    "a tree of several words, keys split": Split(LARGE_TREE),
    "a tree beyond the context limit, in a window": Case(LARGE_TREE, window=7),
    "cached nodes": Case(GROWTH),
    "cached nodes in a window": Case(GROWTH, window=3),
    "a whole prompt": Case(PROMPT),
    "a later chunk": Case(CHUNK),
    "a later chunk, keys split": Split(CHUNK),
    "a later chunk in a window": Case(CHUNK, window=20),
    "several sequences": Case(RAGGED),
    "several sequences, keys split": Split(RAGGED),
    "several sequences in a window, keys split": Split(RAGGED, window=70),
    "more parts than are added up at once": Split(LONG, heads=2, kv_heads=1),
    "more parts than are added up at once, and sinks": Split(LONG, heads=2, kv_heads=1, sinks=True),
    "a window of one": Case(RAGGED, window=1),
    "a chunk beside a tree": Case(MIXED),
    "padding rows": Split(PADDED),
    "padding rows and sinks": Case(PADDED, sinks=True),
    "capped scores": Case(TREE, softcap=2.0),
    "sinks": Case(RAGGED, sinks=True),
    "sinks, keys split": Split(RAGGED, sinks=True),
    "caps, sinks and a window, keys split": Split(RAGGED, softcap=2.0, sinks=True, window=30),
    "one query head per key head": Case(TREE, heads=2, kv_heads=2),
    "eight query heads per key head": Case(TREE, heads=8, kv_heads=1),
    "three query heads per key head": Case(RAGGED, heads=6, kv_heads=2),
    "an odd head dimension": Split(TREE, head_dim=13),
    "a head dimension of 80": Case(TREE, head_dim=80),
    "wide heads": Split(TREE, head_dim=256),
    "heads too wide for the kernels": Case(TREE, head_dim=272),
    # The interpreter cannot multiply it: this one meets the kernels on a GPU only.
    "bfloat16": Split(RAGGED, dtype=torch.bfloat16),
    # Whole blocks that every row sees ask for no mask, but in float32.
    "float16": Case(RAGGED, dtype=torch.float16),
    "float16, keys split": Split(RAGGED, dtype=torch.float16),
    "a later chunk in float16": Case(CHUNK, dtype=torch.float16),
}
# Each word of a layout at least once: the interpreter takes a second for most of them.
INTERPRETED = by_day(
    [
        "decoding rows of several lengths",
        "a tree, keys split",
        "cached nodes in a window",
        "several sequences in a window, keys split",
        "a chunk beside a tree",
        "padding rows and sinks",
        "capped scores",
        "three query heads per key head",
        "an odd head dimension",
        "heads too wide for the kernels",
        "float16",
        "a later chunk in float16",
    ],
    [*CASES],
)


@frozen
class DrawCase:
    """Rows of logits, each with a law, a seed and a place of its own."""

    vocab_size: int
    temperatures: tuple[float, ...] = (0.8, 1.0, 0.01, 3.0)
    top_k: int = 0
    top_p: float = 1.0
    strided: bool = False

    def drawn(self, fused: FusedDraw | None, device: str = "cpu") -> torch.Tensor:
        """int64[rows]: the draws, by the kernel or by the reference."""
        rows, generator = len(self.temperatures), torch.Generator().manual_seed(self.vocab_size)
        logits = 4.0 * torch.randn((rows, self.vocab_size + self.strided), generator=generator)
        logits = logits[:, : self.vocab_size].to(device)
        laws = [
            SamplingParams(each, self.top_p, self.top_k, seed=2**64 - 1 - row, stream=row % 3)
            for row, each in enumerate(self.temperatures)
        ]
        draws = DrawRows.of(laws, np.arange(rows)[:, None] * 1000)
        return torch.from_numpy(begin_draw(logits, draws, fused).taken().astype(np.int64))


DRAWS = {
    "one block": DrawCase(100),
    "a whole block": DrawCase(1024),
    "many blocks": DrawCase(5000, temperatures=(0.8,) * 9),
    "one token": DrawCase(1),
    "truncated": DrawCase(3000, top_k=3),
    # More than the greatest that are looked at first: their rows are drawn again.
    "truncated late": DrawCase(3000, top_k=700),
    "a nucleus, of some rows a late one": DrawCase(3000, top_p=0.9),
    "rows that lie apart": DrawCase(2000, strided=True),
}
