"""Log-probabilities as OpenAI's API reports them: of the raw law, before any sampling option."""

from __future__ import annotations

import torch

from cluster.core import TokenArray, TokenLogprob


def token_logprobs(
    logits: torch.Tensor, token_ids: TokenArray, num_top: int
) -> tuple[TokenLogprob, ...]:
    """One entry per row.

    logits: float32[rows, vocab], unprocessed.  token_ids: int32[rows], the emitted tokens.
    num_top: alternatives per row, most probable first, equal ones by id; 0 = none.
    """
    laws = logits.float().log_softmax(dim=1)
    chosen = laws.gather(1, torch.from_numpy(token_ids).long().to(laws.device).unsqueeze(1))
    values = chosen.squeeze(1).tolist()
    if num_top <= 0:
        return tuple(TokenLogprob(value) for value in values)
    top = laws.topk(min(num_top, laws.shape[1]), dim=1)
    alternatives = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return tuple(
        TokenLogprob(value, tuple(sorted(zip(ids, row, strict=True), key=_by_probability)))
        for value, (ids, row) in zip(values, alternatives, strict=True)
    )


def _by_probability(alternative: tuple[int, float]) -> tuple[float, int]:
    token_id, logprob = alternative
    return -logprob, token_id
