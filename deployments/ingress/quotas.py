"""What callers may have: requests and tokens a minute, and requests at a time, per key and class.

Each ingress process counts what it admits itself, and admits its share of every limit.  A window of
a minute begins with the first request in it.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster import metrics
from cluster.config.access import RateLimits
from cluster.errors import CapacityError, TooLargeError
from cluster.metrics.recorder import Recorder
from cluster.metrics.told import Tokens
from cluster.records import frozen
from deployments.ingress.keys import Caller, KeyRing

# Each name is three series; a file may have thousands of keys.
MAX_NAMES = 100
# No key can have it.
OTHER = "(other)"


@dataclass(slots=True)
class _Window:
    """What was taken in the minute that ends then, by a clock that nobody sets."""

    ends_at: float = -math.inf
    taken: int = 0


@frozen
class _Account:
    """Whose limits they are, in words."""

    name: str
    limits: RateLimits


class Quotas:
    """The counts of one ingress process."""

    def __init__(
        self,
        keys: KeyRing,
        num_processes: int,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """num_processes: ingress processes, which share every limit."""
        self._keys = keys
        self._recorder = recorder
        self._clock = clock
        self.num_processes = num_processes
        self._windows: defaultdict[tuple[str, str], _Window] = defaultdict(_Window)
        self.running: Counter[str] = Counter()
        self._names: set[str] = set()

    def enter(self, caller: Caller, latency_class: str | None) -> Use:
        """Let a request in; raises CapacityError where its key or its class has had enough."""
        accounts = (
            _Account(f"key {caller.name}", caller.key),
            _Account(f"class {latency_class}", self._keys.limits_of_class(latency_class)),
        )
        for account in accounts:
            self._check_running(account)
            self.check(account, "requests", 1)
            self.check(account, "tokens", 1)
        for account in accounts:
            self.running[account.name] += 1
            self.take(account, "requests", 1)
        return Use(self, accounts, caller.name)

    def count(self, name: str, tokens: Tokens) -> None:
        """Count a request of a key that has ended; without a name there are no keys."""
        if not (name and tokens):
            return
        if name not in self._names and len(self._names) >= MAX_NAMES:
            name = OTHER
        self._names.add(name)
        for kind, count in tokens.items():
            self._recorder.add(metrics.KEY_TOKENS, count, key=name, kind=kind)

    def take(self, account: _Account, what: str, amount: int) -> None:
        """Count what a request has used."""
        self._window(account, what).taken += amount

    def _check_running(self, account: _Account) -> None:
        limit = account.limits.concurrent_requests
        if limit and self.running[account.name] >= self._share_of(limit):
            raise CapacityError(
                f"{account.name}: its share of {limit} requests at a time is under way; ask again "
                "when one is over"
            )

    def check(self, account: _Account, what: str, amount: int) -> None:
        """Raise CapacityError or TooLargeError where so much does not fit."""
        limit: int = getattr(account.limits, f"{what}_per_minute")
        if not limit:
            return
        share, window = self._share_of(limit), self._window(account, what)
        if amount > share:
            raise TooLargeError(
                f"{account.name}: the prompt has {amount} tokens, and its share of {limit} tokens "
                f"a minute is {share}; shorten it"
            )
        if window.taken + amount <= share:
            return
        wait_s = max(window.ends_at - self._clock(), 1.0)
        raise CapacityError(
            f"{account.name}: its share of {limit} {what} a minute is used up; ask again in "
            f"{wait_s:.0f} s",
            retry_after_s=wait_s,
        )

    def _window(self, account: _Account, what: str) -> _Window:
        """The present one, which begins with the first request in it."""
        window, now = self._windows[account.name, what], self._clock()
        if window.ends_at <= now:
            window.ends_at, window.taken = now + 60.0, 0  # a minute
        return window

    def _share_of(self, limit: int) -> int:
        return -(-limit // self.num_processes)


class Use:
    """What one request has of its key's and its class's limits, until it leaves."""

    def __init__(self, quotas: Quotas, accounts: Sequence[_Account], name: str) -> None:
        """name: of the key."""
        self._quotas = quotas
        self._accounts = accounts
        self._name = name

    def take_tokens(self, num_tokens: int) -> None:
        """Count the tokens of its prompts; raises CapacityError where they do not fit."""
        for account in self._accounts:
            self._quotas.check(account, "tokens", num_tokens)
        for account in self._accounts:
            self._quotas.take(account, "tokens", num_tokens)

    def leave(self, tokens: Tokens) -> None:
        """It is over, and has used so much."""
        self._quotas.count(self._name, tokens)
        for account in self._accounts:
            self._quotas.running[account.name] -= 1
            self._quotas.take(account, "tokens", tokens["output"])
