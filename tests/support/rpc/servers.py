"""The three servers of the data plane around toys, and those who call them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cluster.config.pem import PartsTlsConfig
from cluster.core import Commit, Request, SamplingParams, token_array
from cluster.rpc import conversations as talk
from cluster.rpc.channel import connect_coordinator, connect_drafter, connect_target
from cluster.rpc.messages import CommitFrame, Open, StepFrame, SubmitFrame
from cluster.rpc.server import serve_worker
from cluster.rpc.tokens import Metadata
from cluster.rpc.trust import NO_TRUST, Trust
from tests.support.rpc.toys import EchoCoordinator, EchoDrafter, EchoTarget, stopping

PATIENCE_S = 20.0
SECRET, OTHER_SECRET = "of-this-cluster-" * 2, "of-another-cluster-" * 2


@dataclass(frozen=True)
class Kind:
    """A server around a toy, and how it is called.  ask: a request that is answered."""

    service: talk.Service[Any, Any]
    connect: Callable[..., Awaitable[tuple[Any, Any]]]
    toy: Callable[[], Any]
    ask: Callable[[int], Any]
    name: str = ""

    @asynccontextmanager
    async def running(self, trust: Trust = NO_TRUST, **options: Any) -> AsyncIterator[Server]:
        async with stopping(await serve_worker(self.toy(), trust=trust, **options)) as server:
            yield Server(self, server.address)


@dataclass(frozen=True)
class Server:
    """A kind of server that runs."""

    kind: Kind
    address: str

    async def link(self, trust: Trust = NO_TRUST) -> Any:
        """A link to it; closing it closes the connection."""
        named = {"name": self.kind.name} if self.kind.name else {}
        _, link = await self.kind.connect(self.address, trust=trust, **named)
        return link

    @asynccontextmanager
    async def neighbour(self, trust: Trust = NO_TRUST) -> AsyncIterator[None]:
        """Somebody whose stream is open before and after what happens inside, and is answered."""
        link = await self.link(trust)
        await answered(self.kind, link, 1)
        yield
        await answered(self.kind, link, 2)
        await link.close()

    @asynccontextmanager
    async def raw(self, *options: tuple[str, int]) -> AsyncIterator[grpc.aio.Channel]:
        """A channel of gRPC's own, without any of our manners."""
        own = [("grpc.use_local_subchannel_pool", 1), *options]
        async with grpc.aio.insecure_channel(self.address, options=own) as channel:
            yield channel

    def method(self, name: str = "") -> str:
        return f"/{self.kind.service.name}/{name or self.kind.service.stream}"

    def token(self, trust: Trust, method: str, worker: str | None = None) -> Metadata:
        keys = trust.keys(self.kind.service.role, self.kind.name)
        own = self.kind.toy().describe().worker_id
        return keys.sign(method, own if worker is None else worker)


async def answered(kind: Kind, link: Any, number: int) -> None:
    """Ask over `link`, and take the answer."""
    await link.send(kind.ask(number))
    await asyncio.wait_for(anext(aiter(link)), PATIENCE_S)


def _step(number: int) -> StepFrame:
    opened = Open(f"r{number}", 1, token_array([1, 2]), 7, 2, SamplingParams(), 8)
    return StepFrame((opened,))


def _commit(number: int) -> CommitFrame:
    ids = token_array([1, 2])
    return CommitFrame((Commit(f"r{number}", 1, 0, 0, ids, 2, 8, params=SamplingParams()),))


def _submit(number: int) -> SubmitFrame:
    return SubmitFrame((Request(f"r{number}", token_array([5, 6]), SamplingParams()),))


KINDS = {
    "target": Kind(talk.TARGET, connect_target, EchoTarget, _step),
    "drafter": Kind(talk.DRAFTER, connect_drafter, EchoDrafter, _commit, "counts"),
    "coordinator": Kind(talk.COORDINATOR, connect_coordinator, EchoCoordinator, _submit),
}


def trusting(*secrets: str, folder: Path | None = None, role: str = "") -> Trust:
    """What a process of that role is given: secrets, newest first, and certificates in `folder`."""
    pem = None
    if folder is not None:
        named = (str(folder / f"{name}.pem") for name in ("cert", "key", "ca"))
        pem = PartsTlsConfig(*named).pem_of(role)
    return Trust((lambda: secrets) if secrets else None, pem)
