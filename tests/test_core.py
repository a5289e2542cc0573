import numpy as np
import pytest

from cluster.core import (
    EMPTY_TOKENS,
    EMPTY_TREE,
    SamplingParams,
    token_array,
)


def test_token_array_copies_only_what_it_must():
    ids = np.array([1, 2, 3], dtype=np.int32)
    assert token_array(ids) is ids
    assert token_array([1, 2, 3]).dtype == np.int32
    assert token_array(np.array([1, 2], dtype=np.int64)).dtype == np.int32
    assert token_array(np.arange(6, dtype=np.int32)[::2]).flags.c_contiguous


def test_token_array_refuses_ids_that_do_not_fit():
    with pytest.raises(OverflowError):
        token_array([2**31])


def test_the_shared_empty_arrays_cannot_be_written():
    assert not EMPTY_TOKENS.flags.writeable
    assert len(EMPTY_TREE) == 0


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), False),
        (SamplingParams(presence_penalty=0.1), True),
        (SamplingParams(frequency_penalty=-0.1), True),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(logit_bias=((1, 2.0),), top_k=5), False),
    ],
)
def test_penalties_are_noticed(params: SamplingParams, expected: bool):
    assert params.has_penalties is expected
