"""The clients' keys: whose a key is and what it allows; their file is watched while it serves."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from functools import partial

from starlette.requests import Request

from cluster.config.access import ClientKey, KeysFile, RateLimits, digest_of
from cluster.config.keys import read_keys
from cluster.config.reloaded import Reloaded
from cluster.config.schema import Config
from cluster.errors import ForbiddenError, UnauthenticatedError
from cluster.records import frozen

_LOOK_EVERY_S = 1.0
_SCHEME = "bearer "


@frozen
class Caller:
    """Who asks.  name: of the key."""

    name: str
    key: ClientKey


# Everybody, where no keys are configured.
ANYBODY = Caller("", ClientKey())


class KeyRing:
    """The keys of `access.keys_file`, as the file has them now."""

    def __init__(self, config: Config) -> None:
        """Read the file; raises ConfigError for one that cannot be used."""
        self._path = config.access.keys_file
        self._callers: Mapping[str, tuple[str, Caller]] = {}
        self._classes: Mapping[str, RateLimits] = {}
        self._file: Reloaded[KeysFile] | None = None
        if self._path:
            self._use(self._read(config))

    @property
    def fault(self) -> str:
        """Why the file as it is now is not used: the keys before it still hold."""
        return self._file.fault if self._file else ""

    @property
    def is_open(self) -> bool:
        """True if nobody is asked for a key."""
        return not self._path

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
        digest = digest_of(key)
        known, caller = self._callers.get(digest, ("", ANYBODY))
        # How long the look-up takes tells of digests alone, and of these no key can be found.
        if not hmac.compare_digest(known, digest):
            raise UnauthenticatedError("the API key is not known here; ask the operator for one")
        return caller

    def limits_of_class(self, name: str | None) -> RateLimits:
        """Return the limits of a latency class, for all keys together."""
        return self._classes.get(name or "", ANYBODY.key)

    def status(self) -> dict[str, object]:
        """Return what /health says of the keys."""
        return {} if self.is_open else {"keys": {"callers": self._names(), "fault": self.fault}}

    async def watch(self) -> None:
        """Look for ever."""
        while self._path:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Read the file again if it has changed; one that is wrong leaves the keys as they are."""
        reloaded = self._file
        if reloaded is not None:
            # A file of thousands of keys takes a second.
            file = await asyncio.to_thread(reloaded.get)
            if reloaded is self._file:  # else another configuration's has come meanwhile
                self._take(file)

    async def use(self, config: Config) -> None:
        """Read the file for another configuration, which may have other classes and tasks; raises
        ConfigError, and then nothing has changed."""
        if self._path:
            self._use(await asyncio.to_thread(self._read, config))

    def _read(self, config: Config) -> Reloaded[KeysFile]:
        return Reloaded((self._path,), partial(read_keys, config))

    def _use(self, file: Reloaded[KeysFile]) -> None:
        self._file = file
        self._take(file.get())

    def _take(self, file: KeysFile) -> None:
        if file.classes is self._classes:  # it is the same
            return
        self._callers = {
            digest: (digest, Caller(name, key))
            for name, key in file.keys.items()
            for digest in filter(None, (key.sha256, key.previous_sha256))
        }
        self._classes = file.classes

    def _names(self) -> list[str]:
        return sorted({caller.name for _, caller in self._callers.values()})


class Operators:
    """Those who may see how the server does: everybody where only this machine reaches it, or where
    nothing is said of keys and of a port for it; else whoever has an admin key."""

    def __init__(self, config: Config, keys: KeyRing) -> None:
        self._keys = keys
        self._has_port = config.access.admin.port is not None
        self.is_everybody = config.http.is_local or (keys.is_open and not self._has_port)

    @classmethod
    def everybody(cls) -> Operators:
        """Return those of a port that asks for no key."""
        return cls(Config(), KeyRing(Config()))

    def owner(self, request: Request) -> str | None:
        """Return of which key alone a request may see the series, by the key's name; None = of all.

        Raises UnauthenticatedError where nobody may see anything without a key."""
        try:
            caller = self._keys.caller(request.headers)
        except UnauthenticatedError:
            if not self.is_everybody:
                raise
            caller = ANYBODY
        return None if caller.key.admin or self._keys.is_open else caller.name

    def check(self, request: Request) -> None:
        """Raise UnauthenticatedError or ForbiddenError for all others."""
        if not self.is_everybody and not self._keys.caller(request.headers).key.admin:
            where = " or ask at access.admin.port" if self._has_port else ""
            raise ForbiddenError(f"this is for operators; send a key with `admin: true`{where}")
