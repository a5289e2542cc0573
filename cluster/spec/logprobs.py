"""Log-probabilities as OpenAI's API reports them: of the raw law, before any sampling option."""

from __future__ import annotations

import numpy as np
import torch

from cluster.core import FloatArray, TokenArray, TokenLogprob
from cluster.records import record
from cluster.spec.transfer import received, sent


@record
class TopTokens:
    """Each row's most probable tokens, the most probable first, equal ones by id.

    token_ids: int32[rows, k].  logprobs: float32[rows, k].
    """

    token_ids: TokenArray
    logprobs: FloatArray


def top_tokens(logits: torch.Tensor, num_top: int) -> TopTokens:
    """The num_top most probable of each row, or all where the vocabulary has no more.

    logits: float32[rows, vocab], unprocessed.
    """
    return _top(_laws(logits), num_top)


def token_logprobs(
    logits: torch.Tensor, token_ids: TokenArray, num_top: int
) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of the emitted tokens and their alternatives, one entry per row.

    logits: float32[rows, vocab], unprocessed.  token_ids: int32[rows], the emitted tokens.
    num_top: alternatives per row, as `top_tokens` has them; 0 = none.
    """
    laws = _laws(logits)
    chosen = laws.gather(1, sent(token_ids.astype(np.int64), laws.device).unsqueeze(1))
    ranks = received((laws > chosen).sum(dim=1).add_(1)).tolist()
    values = received(chosen.squeeze(1)).tolist()
    top = _top(laws, num_top)
    rows = zip(values, ranks, top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
    return tuple(
        TokenLogprob(value, tuple(zip(*pair, strict=True)), rank) for value, rank, *pair in rows
    )


def _laws(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(dim=1)


def _top(laws: torch.Tensor, num_top: int) -> TopTokens:
    found = laws.topk(min(num_top, laws.shape[1]), dim=1)
    values, token_ids = received(found.values), received(found.indices.int())
    order = np.lexsort((token_ids, -values), axis=1)
    return TopTokens(
        np.take_along_axis(token_ids, order, axis=1), np.take_along_axis(values, order, axis=1)
    )
