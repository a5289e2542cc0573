"""The clients' keys: whose a key is and what it allows; their file is watched while it serves.

And what callers may have: requests and tokens a minute, and requests at a time, per key and class.
Each ingress process counts what it admits itself, and admits its share of every limit.  A window of
a minute begins with the first request in it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from cluster import metrics
from cluster.config.doors import ClientKey, RateLimits, digest_of
from cluster.config.pem import Reloaded
from cluster.config.schema import Config
from cluster.errors import CapacityError, ForbiddenError, TooLargeError, UnauthenticatedError
from cluster.metrics.recorder import Recorder, Tokens
from cluster.records import frozen, record
from deployments.access import read_keys

_LOOK_EVERY_S = 1.0
_SCHEME = "bearer "


@frozen
class Caller:
    """Who asks.  name: of the key."""

    name: str
    key: ClientKey


# Everybody, where no keys are configured.
ANYBODY = Caller("", ClientKey())


@frozen
class _Keys:
    """What the file says.  callers: by the digest of a key."""

    callers: Mapping[str, Caller] = field(default_factory=dict)
    classes: Mapping[str, RateLimits] = field(default_factory=dict)


def _read(config: Config) -> _Keys:
    if not config.access.keys_file:
        return _Keys()
    file = read_keys(config)
    callers = {
        digest: Caller(name, key)
        for name, key in file.keys.items()
        for digest in filter(None, (key.sha256, key.previous_sha256))
    }
    return _Keys(callers, file.classes)


def _reloaded(config: Config) -> Reloaded[_Keys]:
    return Reloaded([config.access.keys_file], partial(_read, config))


class KeyRing:
    """The keys of `access.keys_file`, as the file has them now.

    is_open: nobody is asked for a key.  all_operate: everybody may see how the server does, because
    only this machine reaches it, or nothing is said of keys and of a port for it.
    num_processes: ingress processes, which share every limit.
    """

    def __init__(self, config: Config) -> None:
        """Read the file; raises ConfigError for one that cannot be used."""
        access = config.access
        self.is_open, self._has_port = not access.keys_file, access.admin.port is not None
        self.all_operate = config.http.is_local or (self.is_open and not self._has_port)
        self.num_processes = config.ingress.replicas
        # Requests see what was last read: a look at the file belongs in another thread.
        self._file = _reloaded(config)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Return whose key it is that either header has; raises UnauthenticatedError for
        nobody's."""
        if self.is_open:
            return ANYBODY
        authorization, key = headers.get("authorization", ""), headers.get("x-api-key")
        if authorization[: len(_SCHEME)].lower() == _SCHEME:
            key = authorization[len(_SCHEME) :].strip()
        if not key:
            raise UnauthenticatedError("no API key was sent; send Authorization: Bearer KEY")
        # How long the look-up takes tells of digests alone, and of these no key can be found.
        caller = self._file.value.callers.get(digest_of(key))
        if caller is None:
            raise UnauthenticatedError("the API key is not known here; ask the operator for one")
        return caller

    def owner(self, headers: Mapping[str, str]) -> str | None:
        """Return of which key alone a request may see the series, by the key's name; None = of all.

        Raises UnauthenticatedError where nobody may see anything without a key."""
        try:
            caller = self.caller(headers)
        except UnauthenticatedError:
            if not self.all_operate:
                raise
            caller = ANYBODY
        return None if caller.key.admin or self.is_open else caller.name

    def check_operator(self, headers: Mapping[str, str]) -> None:
        """Raise UnauthenticatedError or ForbiddenError for who may not see how the server does:
        unless everybody may, those without an admin key."""
        if not self.all_operate and not self.caller(headers).key.admin:
            where = " or ask at access.admin.port" if self._has_port else ""
            raise ForbiddenError(f"this is for operators; send a key with `admin: true`{where}")

    def limits_of_class(self, name: str | None) -> RateLimits:
        """Return the limits of a latency class, for all keys together."""
        return self._file.value.classes.get(name or "", ANYBODY.key)

    def status(self) -> dict[str, object]:
        """Return what /health says of the keys."""
        names = sorted({caller.name for caller in self._file.value.callers.values()})
        return {} if self.is_open else {"keys": {"callers": names, "fault": self._file.fault}}

    async def watch(self) -> None:
        """Look for ever."""
        while not self.is_open:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Read the file again if it has changed; one that is wrong leaves the keys as they are."""
        # A file of thousands of keys takes a second.
        await asyncio.to_thread(self._file.get)

    async def use(self, config: Config) -> None:
        """Read the file for another configuration, which may have other classes and tasks; raises
        ConfigError, and then nothing has changed."""
        self._file = await asyncio.to_thread(_reloaded, config)
        self.num_processes = config.ingress.replicas


# Each name is three series; a file may have thousands of keys.
MAX_NAMES = 100
# No key can have it.
OTHER = "(other)"


@dataclass(slots=True)
class _Account:
    """What a key or a class has taken.

    name: whose it is, in words.  limits: as they were when a request last entered.
    taken: requests, and tokens, in the minute that ends then, by a clock that nobody sets.
    """

    name: str
    limits: RateLimits
    num_running: int = 0
    taken: Counter[str] = field(default_factory=Counter)
    ends_at: float = -math.inf


class Quotas:
    """The counts of one ingress process."""

    def __init__(self, keys: KeyRing, recorder: Recorder) -> None:
        self._keys = keys
        self._recorder = recorder
        self._clock = time.monotonic
        self._accounts: dict[str, _Account] = {}
        self._names: set[str] = set()

    def enter(self, caller: Caller, latency_class: str | None) -> Use:
        """Let a request in; raises CapacityError where its key or its class has had enough."""
        accounts = (
            self._account(f"key {caller.name}", caller.key),
            self._account(f"class {latency_class}", self._keys.limits_of_class(latency_class)),
        )
        for account in accounts:
            limit = account.limits.concurrent_requests
            if limit and account.num_running >= self._share_of(limit):
                raise CapacityError(
                    f"{account.name}: its share of {limit} requests at a time is under way; ask "
                    "again when one is over"
                )
            self.check(account, "requests", 1)
            self.check(account, "tokens", 1)
        for account in accounts:
            account.num_running += 1
            self.add(account, "requests", 1)
        return Use(self, accounts, caller.name)

    def _account(self, name: str, limits: RateLimits) -> _Account:
        account = self._accounts.setdefault(name, _Account(name, limits))
        account.limits = limits
        return account

    def count(self, name: str, tokens: Tokens) -> None:
        """Count a request of a key that has ended; without a name there are no keys."""
        if not (name and tokens):
            return
        if name not in self._names and len(self._names) >= MAX_NAMES:
            name = OTHER
        self._names.add(name)
        for kind, count in tokens.items():
            self._recorder.add(metrics.KEY_TOKENS, count, key=name, kind=kind)

    def check(self, account: _Account, what: str, amount: int) -> None:
        """Raise CapacityError or TooLargeError where so much does not fit."""
        limit: int = getattr(account.limits, f"{what}_per_minute")
        if not limit:
            return
        share, taken = self._share_of(limit), self.add(account, what, 0)
        if amount > share:
            raise TooLargeError(
                f"{account.name}: the prompt has {amount} tokens, and its share of {limit} tokens "
                f"a minute is {share}; shorten it"
            )
        if taken + amount <= share:
            return
        wait_s = max(account.ends_at - self._clock(), 1.0)
        raise CapacityError(
            f"{account.name}: its share of {limit} {what} a minute is used up; ask again in "
            f"{wait_s:.0f} s",
            retry_after_s=wait_s,
        )

    def add(self, account: _Account, what: str, amount: int) -> int:
        """Take so much of the present minute, which begins with the first request in it; returns
        what is taken of it then."""
        now = self._clock()
        if account.ends_at <= now:
            account.ends_at = now + 60.0  # a minute
            account.taken.clear()
        account.taken[what] += amount
        return account.taken[what]

    def _share_of(self, limit: int) -> int:
        return -(-limit // self._keys.num_processes)


@record
class Use:
    """What one request has of its key's and its class's limits, until it leaves.

    name: of the key."""

    _quotas: Quotas
    _accounts: Sequence[_Account]
    _name: str

    def take_tokens(self, num_tokens: int) -> None:
        """Count the tokens of its prompts; raises CapacityError where they do not fit."""
        for account in self._accounts:
            self._quotas.check(account, "tokens", num_tokens)
        for account in self._accounts:
            self._quotas.add(account, "tokens", num_tokens)

    def leave(self, tokens: Tokens) -> None:
        """It is over, and has used so much."""
        self._quotas.count(self._name, tokens)
        for account in self._accounts:
            account.num_running -= 1
            self._quotas.add(account, "tokens", tokens["output"])
