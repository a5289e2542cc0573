"""Whole rounds of a draft head on the device: trees of several texts, grown by graphs.

Whoever grows a tree on the host waits after each pass for its best tokens, to know which nodes the
next one expands.  Here the trees lie on the device, in fixed shapes (`cluster.draft.head_passes`):
what the host knows is sent in one copy, one graph runs the roots and another each further pass, and
the host reads once what came of it and grows its own trees alike (`Eagle3Drafter`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cluster.draft.head_passes import MAX_STOPS, NUM_FIXED, Network, Passes, RoundText
from cluster.draft.inside import IndexArray
from cluster.engine.graphs.capture import Capture, Replay, Staging
from cluster.records import record

# Texts of a round; with more, a pass has work for the whole device, and its launches are no matter.
_TEXTS = (1, 2, 4, 8)
# Tokens before a text's end that the head attends to: a round has the least that holds them.
_CONTEXTS = (256, 1024, 4096, 16384)
# Passes behind the roots' between two waits: a tree of 8 nodes takes 2.5 in all on average
# (`cluster.draft.live_tree`), and one that is not needed costs a read of the head's weights.
_PASSES = 2
_WORDS_PER_NUMBER = 2


@record
class Expanded:
    """What came of some texts' rounds, by text and place.

    tokens, parents: int64[texts, places], the nodes that were expanded and the places of their
    parents; a token of -1 = none was.  token_ids: int64[texts, places, candidates], each node's
    candidates, best first.  scores: float64, theirs.
    """

    tokens: IndexArray
    parents: IndexArray
    token_ids: IndexArray
    scores: npt.NDArray[np.float64]


class DeviceRounds:
    """One thread at a time; call in inference mode."""

    def __init__(self, network: Network, max_nodes: int, capture: Capture) -> None:
        """max_nodes: of a tree."""
        self._network, self._capture = network, capture
        self._replays: dict[tuple[int, int], tuple[Replay, Replay]] = {}
        most = _TEXTS[-1], NUM_FIXED + self._context(network.options.context)
        self._staging = Staging(most[0] * most[1] * _WORDS_PER_NUMBER, network.kv.device)
        self._state = network.new_state(_TEXTS[-1], max_nodes + 2)  # the root, and nobody

    def takes(self, texts: Sequence[RoundText]) -> bool:
        """True if these trees can grow here."""
        options, params = self._network.options, [each.request.params for each in texts]
        return (
            len(texts) <= _TEXTS[-1]
            and len(texts) * options.width <= options.max_rows
            and all(len(each.stop_token_ids) <= MAX_STOPS for each in params)
            and not any(each.has_penalties or each.logit_bias for each in params)
        )

    def begin(self, texts: Sequence[RoundText]) -> Expanded:
        """Begin a tree behind each of these texts; returns its first passes."""
        num_texts = next(each for each in _TEXTS if each >= len(texts))
        context = self._context(max(len(each.positions) for each in texts))
        shape = num_texts, NUM_FIXED + context
        num_words = shape[0] * shape[1] * _WORDS_PER_NUMBER
        if shape not in self._replays:
            words = self._staging.words[:num_words]
            state = {name: each[:num_texts] for name, each in self._state.items()}
            passes = Passes(self._network, state, words.view(torch.int64).view(shape))
            # Captured before anything is staged: what they do then is overwritten.
            self._replays[shape] = self._capture(passes.start), self._capture(passes.further)
        given = self._staging.area()[:num_words].view(np.int64).reshape(shape)
        given[:] = 0
        given[:, NUM_FIXED:] = -1
        for text, row in zip(texts, given, strict=False):
            text.write(row)
        self._staging.send(num_words)
        start, self._further = self._replays[shape]
        start()
        self._num_texts = len(texts)
        return self.go_on()

    def go_on(self) -> Expanded:
        """Some more passes of the same texts."""
        for _ in range(_PASSES):
            self._further()
        # The only time that the host waits.
        found = self._state["found"][: self._num_texts, :-1].cpu().numpy()
        split = 2 + self._network.num_candidates
        scores = found[:, :, split:].view(np.float64)
        return Expanded(found[:, :, 0] - 1, found[:, :, 1], found[:, :, 2:split], scores)

    def _context(self, length: int) -> int:
        most = self._network.options.context
        return min(next((each for each in _CONTEXTS if each >= length), most), most)
