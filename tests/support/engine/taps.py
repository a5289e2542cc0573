"""Follows an engine's taps as a consumer does, and compares them with transformers' own."""

from collections.abc import Sequence
from typing import Any

import torch

from cluster.core import EMPTY_TREE, TokenArray, TokenTree
from cluster.engine.engine import Engine, Output, Work
from tests.support.engine.driver import run
from tests.support.spec.trees import paths

FLOAT32_BOUND = 1e-5
TAPS = (2, 0, 1, -1)


class TapLog:
    """Every row that came, by request and position; a row that comes again replaces its former."""

    def __init__(self, engine: Engine, taps: Sequence[int], oracle: Any = None) -> None:
        self.engine, self.oracle = engine, oracle
        self.taps = taps
        self.context: dict[str, dict[int, torch.Tensor]] = {}
        self.nodes: dict[str, torch.Tensor] = {}
        self.chunks: list[tuple[str, int, int]] = []
        self._step = engine.step
        engine.step = self._logged

    def run(self, work: Work) -> Output:
        return run(self.engine, work)

    def check(
        self, name: str, text: TokenArray, tree: TokenTree = EMPTY_TREE, start: int = 0
    ) -> None:
        """What came of a text from that position on, and of a tree behind it, is transformers'."""
        expected = expected_taps(self.oracle, text, self.taps)[start:]
        assert errors(self.text(name, start, len(text)), expected).max() <= FLOAT32_BOUND
        if len(tree):
            nodes = expected_nodes(self.oracle, text, tree, self.taps)
            assert errors(self.nodes[name], nodes).max() <= FLOAT32_BOUND

    def _logged(self) -> list[Output]:
        outputs = self._step(self.taps)
        summary = self.engine.last_step
        if summary.taps is None:
            assert summary.num_rows == 0, "a step without its taps"
            return outputs
        assert len(summary.taps.rows) == summary.num_rows
        for each in summary.taps.sequences:
            found, rows = summary.taps.of(each.request_id)
            assert found is each
            assert len(rows) == each.stop - each.start
            self.chunks.append((each.request_id, each.first_position, each.num_context))
            log = self.context.setdefault(each.request_id, {})
            for index in range(each.num_context):
                log[each.first_position + index] = rows[index]
            self.nodes[each.request_id] = rows[each.num_context :]
        return outputs

    def text(self, request_id: str, start: int, stop: int) -> torch.Tensor:
        """[stop - start, taps, hidden] of those positions of the text."""
        log = self.context[request_id]
        return torch.stack([log[position] for position in range(start, stop)])


def expected_taps(
    oracle: Any, token_ids: TokenArray | Sequence[int], taps: Sequence[int]
) -> torch.Tensor:
    """[tokens, taps, hidden]: of one plain forward of the text."""
    ids = torch.as_tensor(token_ids, dtype=torch.int64)[None]
    with torch.inference_mode():
        states = oracle(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    return torch.stack([states[tap][0] for tap in taps], dim=1)


def expected_nodes(
    oracle: Any, context: TokenArray, tree: TokenTree, taps: Sequence[int]
) -> torch.Tensor:
    """[nodes, taps, hidden]: of one plain forward of each path, its last row."""
    texts = [[*context.tolist(), *path] for path in paths(tree)]
    return torch.stack([expected_taps(oracle, text, taps)[-1] for text in texts])


def errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The relative error of each row of each tap: [rows, taps]."""
    assert found.shape == expected.shape
    found, expected = found.float(), expected.float()
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)
