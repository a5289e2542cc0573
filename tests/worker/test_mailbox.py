"""What has come for the engine thread: in order, at once, and nobody waits for ever."""

from __future__ import annotations

import threading

import pytest

from cluster.messages import StepFrame
from cluster.worker.mailbox import Mailbox, TargetStream


async def test_frames_come_in_order_and_all_at_once() -> None:
    mailbox, stream = Mailbox(), TargetStream(1)
    frames = [StepFrame(serial=number) for number in range(3)]
    for frame in frames:
        mailbox.put(stream, frame)
    mailbox.put(stream, None)
    assert mailbox.take(is_busy=False) == [*((stream, frame) for frame in frames), (stream, None)]
    assert mailbox.take(is_busy=True) == []


def test_calls_are_made_by_whoever_takes_and_give_back_what_they_return_or_raise() -> None:
    mailbox = Mailbox()
    where, failing = mailbox.call(threading.get_ident), mailbox.call(lambda: 1 // 0)
    taking = threading.Thread(target=lambda: mailbox.take(is_busy=False))
    taking.start()
    taking.join(20)
    assert where.result(0) == taking.ident
    with pytest.raises(ZeroDivisionError):
        failing.result(0)


def test_a_call_that_was_given_up_is_not_made() -> None:
    mailbox, made = Mailbox(), list[int]()
    mailbox.call(lambda: made.append(1)).cancel()
    mailbox.call(lambda: made.append(2))
    assert mailbox.take(is_busy=True) == []
    assert made == [2]


def test_one_that_waits_goes_on_when_it_is_closed() -> None:
    mailbox, found = Mailbox(), list[object]()
    taking = threading.Thread(target=lambda: found.append(mailbox.take(is_busy=False)))
    taking.start()
    mailbox.close()
    taking.join(20)
    assert found == [None]


def test_calls_before_and_after_the_end_are_cancelled() -> None:
    mailbox = Mailbox()
    before = mailbox.call(lambda: 1)
    mailbox.close()
    after = mailbox.call(lambda: 2)
    assert before.cancelled()
    assert after.cancelled()
    assert mailbox.take(is_busy=True) is None
