"""Frames over the limit are sent as several, and those say the same."""

from __future__ import annotations

import pytest

from cluster.core import Verdict, token_array
from cluster.errors import TooLargeError
from cluster.messages import CacheMiss, ProposalFrame, StepReport, VerdictFrame, VerifyFrame
from cluster.rpc.codec_target import VERIFY
from cluster.rpc.frames import split
from tests.support.rpc.frames_strategy import same, verify_item


def test_a_frame_over_the_limit_is_split_into_several_with_the_same_items() -> None:
    items = tuple(verify_item(f"request-{index}") for index in range(9))
    frame = VerifyFrame(items, ("x", "y"))
    parts = VERIFY.encode(frame, max_bytes=120)
    assert len(parts) > 1
    assert all(len(part) <= 120 for part in parts)
    decoded = [VERIFY.decode(part).frame for part in parts]
    joined = VerifyFrame(
        tuple(item for part in decoded for item in part.items),
        tuple(name for part in decoded for name in part.released),
    )
    assert same(joined, frame)


def test_a_single_item_over_the_limit_is_refused() -> None:
    frame = VerifyFrame((verify_item("a", delta_len=1000),))
    with pytest.raises(TooLargeError, match="limit is 1000"):
        VERIFY.encode(frame, max_bytes=1000)


def test_a_split_frame_keeps_its_scalars_with_the_last_part() -> None:
    verdict = Verdict("a", 1, 5, token_array([]), token_array([1]))
    frame = VerdictFrame((verdict,), (CacheMiss("b", 1, 0),), report=StepReport(step_time_s=1.0))
    halves = split(frame)
    assert halves is not None
    first, second = halves
    assert (len(first.verdicts), len(first.misses), first.report) == (1, 0, None)
    assert (len(second.verdicts), len(second.misses)) == (0, 1)
    assert second.report == StepReport(step_time_s=1.0)


@pytest.mark.parametrize("is_apart", [True, False])
def test_only_the_first_part_of_a_split_frame_keeps_is_apart(
    is_apart: bool,
) -> None:
    items = tuple(verify_item(f"r{index}", delta_len=30) for index in range(4))
    frame = VerifyFrame(items, is_apart=is_apart)
    (whole,) = VERIFY.encode(frame)
    assert VERIFY.decode(whole).frame.is_apart is is_apart
    first, *others = [VERIFY.decode(part).frame for part in VERIFY.encode(frame, max_bytes=200)]
    assert first.is_apart is is_apart
    assert others
    assert not any(part.is_apart for part in others), "they belong to the same step"


@pytest.mark.parametrize("num_items", [0, 1, 2, 3, 7])
def test_a_split_frame_releases_requests_before_it_reopens_them(num_items: int) -> None:
    names = tuple(f"r{index}" for index in range(num_items))
    frame = VerifyFrame(tuple(verify_item(name, delta_len=30) for name in names), (*names, *"xyz"))
    parts = [VERIFY.decode(data).frame for data in VERIFY.encode(frame, max_bytes=150)]
    assert len(parts) >= num_items
    assert tuple(item.request_id for part in parts for item in part.items) == names
    assert tuple(name for part in parts for name in part.released) == frame.released
    if num_items:
        first = next(index for index, part in enumerate(parts) if part.items)
        assert not any(part.released for part in parts[first + 1 :])


def test_a_frame_without_two_items_cannot_be_split() -> None:
    assert split(VerifyFrame((verify_item("a"),))) is None
    assert split(ProposalFrame(pages_total=3)) is None
