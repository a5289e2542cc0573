"""Log-probabilities are those of the raw law, most probable first."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cluster.core import token_array
from cluster.spec.logprobs import token_logprobs

# Two rows of probabilities; the logits are off by a constant per row, as raw logits are.
LAWS = np.array([[0.5, 0.2, 0.2, 0.1], [0.1, 0.3, 0.2, 0.4]])
LOGITS = torch.tensor(np.log(LAWS) + np.array([[3.0], [-7.0]]), dtype=torch.float32)


def test_each_emitted_token_has_its_log_probability() -> None:
    entries = token_logprobs(LOGITS, token_array([2, 3]), 0)
    assert [entry.top for entry in entries] == [(), ()]
    assert [entry.logprob for entry in entries] == pytest.approx(np.log([0.2, 0.4]), abs=1e-6)


def test_alternatives_come_most_probable_first_and_equal_ones_by_id() -> None:
    first, second = token_logprobs(LOGITS, token_array([0, 0]), 3)
    assert [token for token, _ in first.top] == [0, 1, 2]
    assert [token for token, _ in second.top] == [3, 1, 2]
    assert [value for _, value in second.top] == pytest.approx(np.log([0.4, 0.3, 0.2]), abs=1e-6)


def test_no_more_alternatives_are_reported_than_there_are_tokens() -> None:
    (entry,) = token_logprobs(LOGITS[:1], token_array([0]), 20)
    assert [token for token, _ in entry.top] == [0, 1, 2, 3]


def test_half_precision_is_normalised_in_single() -> None:
    half = LOGITS.to(torch.bfloat16)
    entries = token_logprobs(half, token_array([0, 1]), 4)
    same = token_logprobs(half.float(), token_array([0, 1]), 4)
    assert entries == same
