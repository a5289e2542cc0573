"""The sampling state of one text."""

from __future__ import annotations

import numpy as np
import torch

from cluster.core import EMPTY_TREE, SamplingParams, TokenArray, TokenMask, TokenTree, token_array
from cluster.errors import RequestError
from cluster.grammar.text import GrammarHook
from cluster.requests.fields import Redraw
from cluster.spec.penalties import (
    Counts,
    TokenBias,
)
from cluster.spec.token_log import TokenLog
from cluster.spec.transfer import sent
from cluster.spec.tree import Indices, depths, subtree

NO_LOGITS = torch.empty(0)


class SampledText:
    """What the draws of one text depend on, and its rows in the present step.

    tree: the nodes of its work, which are those that the hook allows.  kept: their places in the
    tree that it began with, None = all.  failure: raised by the hook; the request ends with it.
    redraws: of an audit, in the present step.
    logits: float32[n + 1, vocab] of the step's rows, the root's first; start: the first of these
    rows among those of the batch; mask: the tokens that its hook allows at each of them, None = all
    tokens, or the request has failed and its draws are not used.
    """

    def __init__(
        self,
        tokens: TokenLog,
        prompt_len: int,
        params: SamplingParams,
        vocab_size: int,
        device: torch.device,
        hook: GrammarHook | None = None,
        *,
        is_audit: bool = False,
    ) -> None:
        self.tokens, self.prompt_len, self.params = tokens, prompt_len, params
        self.hook = hook
        self.seed = params.noise_key
        self.forced = token_array(params.forced_ids)
        self.is_audit = is_audit
        self.tree = EMPTY_TREE
        self.kept: TokenArray | None = None
        self.logits = NO_LOGITS
        self.start = 0
        self.mask: TokenMask | None = None
        self.failure: RequestError | None = None
        self.redraws: tuple[Redraw, ...] = ()
        self.bias = TokenBias.of(params.logit_bias, device) if params.logit_bias else None
        stops = [token for token in params.stop_token_ids if 0 <= token < vocab_size]
        self.banned = (
            sent(np.array(stops, np.int64), device) if stops and params.min_tokens > 0 else None
        )
        self._vocab_size = vocab_size
        self._device = device
        self._counts: Counts | None = None
        self._num_counted = 0  # tokens of the text in _counts
        self._num_hooked = prompt_len  # tokens of the text that the hook knows

    def begin(self, tree: TokenTree) -> None:
        """Begin a step of the text: the nodes that its hook allows become its `tree`."""
        self.tree, self.kept = tree, None
        if self.hook is not None:
            self.hook.extend(self.tokens.since(self._num_hooked))
            self._num_hooked = len(self.tokens)
            self.kept = token_array(self.hook.prepare(tree))
            self.tree = subtree(tree, self.kept)

    @property
    def output_len(self) -> int:
        """Output tokens so far: the output position of the next one."""
        return len(self.tokens) - self.prompt_len

    @property
    def num_rows(self) -> int:
        """Of `logits`."""
        return len(self.tree) + 1

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.num_rows)

    @property
    def positions(self) -> Indices:
        """Output position of the draw at each row."""
        positions = np.zeros(self.num_rows, dtype=np.int64)
        positions[1:] = depths(self.tree.parents)
        return positions + self.output_len

    @property
    def is_adjusted(self) -> bool:
        """True if bias, penalties or bans change its logits now."""
        bans = self.banned is not None and self.output_len < self.params.min_tokens
        return self.params.has_penalties or self.bias is not None or bans

    def ask_hook(self) -> None:
        """Take the mask from the hook; that of the step before has other rows."""
        self.mask = None
        try:
            if self.hook is not None:
                self.mask = self.hook.masks()
        except RequestError as error:
            self.failure = error

    @property
    def counts(self) -> Counts:
        """Occurrences in the text so far."""
        tokens = self.tokens
        if self._counts is None:
            prompt, output = np.split(tokens.token_ids, [self.prompt_len])
            self._counts = Counts.of(prompt, output, self._vocab_size, self._device)
        elif self._num_counted < len(tokens):
            self._counts.add(tokens.since(self._num_counted))
        self._num_counted = len(tokens)
        return self._counts
