"""Accepts the drafts of one sequence by the textbook's laws, from the rows of a step."""

from __future__ import annotations

import numpy as np
import torch

from cluster.core import TokenArray
from cluster.requests.acceptance_law import NO_LAWS
from cluster.spec.forest import Floats
from cluster.spec.rejection import walk_in_turn
from cluster.spec.sampling import RowLaws, scale, survivors
from cluster.worker.target_sequence import TargetSequence, adjusted, no_law


def walk_by_ratio(sequence: TargetSequence) -> tuple[TokenArray, TokenArray]:
    """Return (path, token_ids) as `cluster.spec.verify.walk_draws` does.

    Only the rows that the walk comes to are made probabilities.  Raises WorkerError for broken
    logits, and what the sequence's own hook raises.
    """
    logits = adjusted(sequence)
    if sequence.failure is not None:
        raise sequence.failure
    params, text = sequence.params, sequence.text
    # A grammar cuts nodes off by what they are, so they all count as chosen, cut off or not.
    drawn = text.laws if sequence.hook is None else NO_LAWS
    laws = RowLaws.of([params], logits.device)
    temperature = np.float32(laws.temperature.item())

    def law_of(node: int) -> Floats:
        row = logits[node + 1 : node + 2]  # [1, vocab]
        if sequence.truncated:
            scaled = scale(row, row.amax(dim=1), laws.temperature)
            cutoffs = survivors(scaled, laws).cutoffs
            row = row.masked_fill(scaled < cutoffs.unsqueeze(1), -torch.inf)
        # One row is too little for several threads to share: waiting for each other they take
        # longer than numpy does alone.
        values = row[0].cpu().numpy()
        maximum = values.max()
        if not np.isfinite(maximum):
            raise no_law(len(text.tokens))
        weights = np.exp((values - maximum) / temperature)
        return np.asarray(weights / weights.sum(dtype=np.float64), dtype=np.float64)

    key = (sequence.seed, params.stream, text.output_len)
    return walk_in_turn(sequence.tree, drawn, law_of, key)
