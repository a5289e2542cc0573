"""What is left for a worker's thread: calls, which it makes in their order."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from cluster.worker.mailbox import ThreadMail


def test_calls_are_made_in_order_by_whoever_takes_and_give_back_what_they_return_or_raise() -> None:
    mailbox, made = ThreadMail(), list[object]()
    mailbox.put(partial(made.append, 1))
    where, failing = mailbox.call(threading.get_ident), mailbox.call(lambda: 1 // 0)
    mailbox.call(partial(made.append, "given up")).cancel()
    mailbox.put(partial(made.append, 2))
    taking = threading.Thread(target=lambda: mailbox.take(is_busy=False))
    taking.start()
    taking.join(20)
    assert made == [1, 2]
    assert where.result(0) == taking.ident
    with pytest.raises(ZeroDivisionError):
        failing.result(0)
    assert mailbox.take(is_busy=True)
    assert made == [1, 2]


def test_one_that_waits_goes_on_when_it_is_closed() -> None:
    mailbox, found = ThreadMail(), list[object]()
    taking = threading.Thread(target=lambda: found.append(mailbox.take(is_busy=False)))
    taking.start()
    mailbox.close()
    taking.join(20)
    assert found == [False]


def test_calls_behind_one_that_ends_the_thread_and_after_the_end_are_cancelled() -> None:
    mailbox = ThreadMail()
    mailbox.put(lambda: 1 // 0)
    before = mailbox.call(lambda: 1)
    with pytest.raises(ZeroDivisionError):
        mailbox.take(is_busy=True)
    mailbox.close()
    after = mailbox.call(lambda: 2)
    assert before.cancelled()
    assert after.cancelled()
    assert not mailbox.take(is_busy=True)
