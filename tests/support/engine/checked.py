"""An engine whose every answer is compared with transformers' own."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from cluster.core import EMPTY_TREE, TokenArray, TokenTree
from cluster.engine.engine import Output, Work
from tests.support.engine.driver import expected_rows, load_engine, load_oracle, rows, run
from tests.support.engine.integrity import check_integrity

oracle_of = lru_cache(load_oracle)


class Checked:
    """most: the most pages that each pool held after any step; the books balance after each."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.engine, self.oracle = load_engine(folder, **settings), oracle_of(folder)
        self.windows = [group.reach.window for group in self.engine.cache.groups]
        self.most = [0] * len(self.windows)
        self._step = self.engine.step
        self.engine.step = self._watched

    @property
    def held(self) -> list[int]:
        return [pool.num_held for pool in self.engine.page_owners.pools]

    def run(
        self,
        name: str,
        base_len: int,
        context: TokenArray,
        tree: TokenTree = EMPTY_TREE,
        **fields: Any,
    ) -> Output:
        """context: the whole text, of which the engine is to hold base_len tokens."""
        delta = context[base_len:]
        output = run(self.engine, Work(name, base_len, delta, tree, **fields))
        if output.logits is not None:
            num_rows = bool(len(delta)) + len(tree) - fields.get("num_cached_nodes", 0)
            expected = expected_rows(self.oracle, context, tree)[1 + len(tree) - num_rows :]
            self.close(rows(output), expected)
        return output

    def close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        # Our kernels do not share the oracle's order of sums, as torch's do: float32's rounding was
        # seen to reach 3.4e-5 with random experts, and 3.0e-5 without (AMD EPYC, AVX-512).
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=5e-5)

    def _watched(self, *arguments: Any) -> list[Output]:
        outputs = self._step(*arguments)
        check_integrity(self.engine)
        self.most = list(map(max, self.most, self.held))
        return outputs
