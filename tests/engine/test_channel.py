"""What the leading rank says arrives whole at every other, and a rank that has gone is noticed."""

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import pytest
from torch.distributed import HashStore

from cluster.engine import channel
from cluster.engine.channel import Channel, connect

T = TypeVar("T")

HOST = "127.0.0.1"
NUM_RANKS = 3
BODIES = [b"", b"short", bytes(range(256)) * 20_000]


def store_of(timeout_s: float = 60.0) -> HashStore:
    store = HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def on_all(*calls: Callable[[], T]) -> list[T]:
    """The results of what the ranks do at a time."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [each.result() for each in [threads.submit(call) for call in calls]]


def connected(store: HashStore, host: str) -> list[Channel]:
    return on_all(*(partial(connect, rank, NUM_RANKS, host, store) for rank in range(NUM_RANKS)))


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as own:
        own.bind(("::1", 0))
        return True
    return False


@pytest.fixture(params=[HOST, *(["::1"] if has_ipv6() else [])])
def channels(request: pytest.FixtureRequest) -> Iterator[list[Channel]]:
    found = connected(store_of(), request.param)
    yield found
    for each in found:
        each.close()


@pytest.mark.parametrize("body", BODIES, ids=len)
def test_all_ranks_have_what_the_leader_says(channels: list[Channel], body: bytes):
    leader, *others = channels
    assert on_all(lambda: leader.share(body), *(each.share for each in others)) == [body] * 3


@pytest.mark.parametrize("values", [(5, 0, 9), (-(2**63), 2**63 - 1, 0), (3, 4, 2)])
def test_all_ranks_have_the_least_value(channels: list[Channel], values: tuple[int, ...]):
    calls = map(partial, [each.least for each in channels], values)
    assert on_all(*calls) == [min(values)] * 3


def test_the_leader_notices_a_rank_that_has_gone_before_it_says_anything(
    channels: list[Channel],
):
    leader, first, second = channels
    second.close()
    with pytest.raises((OSError, EOFError)):
        leader.share(b"calls")
    # Nothing was sent: the other one would run a step that its neighbours do not.
    leader.close()
    with pytest.raises((OSError, EOFError)):
        first.share()


def test_others_notice_that_the_leader_has_gone(channels: list[Channel]):
    leader, first, second = channels
    leader.close()
    for call in (first.share, lambda: second.least(1)):
        with pytest.raises((OSError, EOFError)):
            call()


@pytest.mark.parametrize("word", [bytes(16), b""], ids=["wrong", "nothing at all"])
def test_who_does_not_know_the_word_is_no_rank(word: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel, "_SILENCE_S", 1)
    store = store_of()

    def stranger() -> bytes:
        port, _ = json.loads(store.get("drafthouse/channel/1"))
        with socket.create_connection((HOST, port)) as peer, suppress(OSError):
            peer.sendall(word)
            while peer.recv(1024):
                pass
        return b""

    def late(number: int) -> Channel:
        store.wait(["strangers have left"])
        return connect(number, NUM_RANKS, HOST, store)

    def strangers() -> list[Channel]:
        assert [stranger() for _ in range(2)] == [b""] * 2
        store.set("strangers have left", "1")
        return []

    leader, first, second, _ = on_all(
        lambda: [connect(0, NUM_RANKS, HOST, store)],
        lambda: [late(1)],
        lambda: [late(2)],
        strangers,
    )
    ranks = [*leader, *first, *second]
    assert on_all(lambda: ranks[0].share(b"a"), ranks[1].share, ranks[2].share) == [b"a"] * 3
    for each in ranks:
        each.close()


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_the_store_says():
    with pytest.raises(OSError, match="timed out"):
        connect(0, 2, HOST, store_of(timeout_s=0.2))
