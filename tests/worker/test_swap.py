"""What is checked of a drafter's other model before it takes the place of the one that drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.errors import ConfigError
from cluster.messages import WorkerDescription
from cluster.worker.models import check_successor

FORMER = WorkerDescription("w", "drafter", "lm", tokenizer_hash="a" * 64, vocab_size=100)


@pytest.mark.parametrize(
    ("tokenizer_hash", "vocab_size", "fits"),
    [
        ("a" * 64, 100, True),
        ("a" * 64, 104, True),  # padded
        ("b" * 64, 100, False),
        ("", 100, True),
        ("", 104, False),
        ("", 0, True),  # a look-up, which reads any
    ],
)
def test_a_drafter_of_the_pool_goes_on_in_the_vocabulary_of_the_one_before(
    tokenizer_hash: str, vocab_size: int, fits: bool
) -> None:
    later = replace(FORMER, tokenizer_hash=tokenizer_hash, vocab_size=vocab_size)
    if fits:
        check_successor(FORMER, later)
        return
    with pytest.raises(ConfigError, match=r"drafters\.lm\.options: .* use one with the target's"):
        check_successor(FORMER, later)
