"""What answers in OpenAI's format say of log-probabilities."""

from __future__ import annotations

import pytest

from cluster.core import TokenLogprob
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.logprob_writer import LogprobWriter


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_the_drawn_token_is_among_the_top_ones_however_unlikely(
    tokenizer: Tokenizer, num_top: int
) -> None:
    likely, second, drawn = tokenizer.encode("abc").tolist()
    top = ((likely, -0.1), (second, -2.5))[:num_top]
    logprobs = [TokenLogprob(-7.0, top), TokenLogprob(-0.1, top)]
    written = LogprobWriter(tokenizer).completion([drawn, likely], logprobs, [0, 1])
    unlikely, ordinary = written["top_logprobs"]
    assert set(unlikely) == {*"ab"[:num_top], "c"}
    assert unlikely["c"] == written["token_logprobs"][0] == -7.0
    assert len(ordinary) == max(num_top, 1)
    assert ordinary["a"] == -0.1
