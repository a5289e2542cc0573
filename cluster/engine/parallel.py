"""Tensor parallelism: one engine per rank, rank 0 leads, the others repeat what it does.

Every rank loads the model with transformers' tensor-parallel plan and runs the same deterministic
scheduler.  Rank 0 collects the calls made on its engine and sends them when it steps; the others
replay them, and before each forward all ranks compare what they are about to run.  Nothing
here needs Ray: a target's process and its children (`cluster.worker.ranks`) call

    init_rank(rank, world_size, "10.0.0.1:29500")
    engine = Engine.load(config)
    engine.follow()          # on every rank but 0; returns when rank 0 closes its engine

Commands travel as JSON, on a channel of the ranks' own, which
waits for them without limit but notices a closed connection at once.  The model's collectives time
out: after hours while ranks load, one faster than the other, and soon once all have loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is public all the same
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout, _world
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.distributed import DistributedConfig

from cluster.core import TokenTree, token_array
from cluster.engine.channel import connect
from cluster.engine.types import LayerSpec
from cluster.engine.work import Work
from cluster.errors import ConfigError, ProtocolError, WorkerError

# The calls on rank 0's engine that the other ranks repeat, and their form on the way.
#
# A message is the calls as JSON: of each its name and its arguments.  Nothing that arrives is run
# but a call of these names.

# Methods of the engine; the last one ends the others' work.
CALLS = ("submit", "retain", "release", "forget_prefixes", "capture_ahead", "step", "close")
# Of a work, what concerns the leading rank alone, or is served by one rank only.
_UNTOLD = ("num_top", "adapter")

# One of CALLS, and its arguments.
Call = tuple[str, Sequence[Any]]


def encode(calls: Sequence[Call]) -> bytes:
    """The body of a message."""
    return json.dumps(calls, default=_plain).encode()


def _plain(value: Any) -> Any:
    """A work, and what it consists of."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return value.hex()
    return [getattr(value, each.name) for each in fields(value) if each.name not in _UNTOLD]


def decode(body: bytes) -> list[Call]:
    """The calls of a body; raises ProtocolError for anything else."""
    try:
        return [(name, _arguments(name, given)) for name, given in json.loads(body)]
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ProtocolError(f"a rank's commands cannot be read: {error}") from error


def _arguments(name: str, given: Sequence[Any]) -> Sequence[Any]:
    if name not in CALLS:
        raise ProtocolError(f"a rank's commands hold one of the unknown kind {name!r}")
    if name != "submit":
        return given
    request_id, base_len, delta, tree, num_cached_nodes, prefix_hash, tenant = given[0]
    return [
        Work(
            request_id,
            base_len,
            token_array(delta),
            TokenTree(*map(token_array, tree)),
            num_cached_nodes,
            prefix_hash,
            bytes.fromhex(tenant),
        )
    ]


# In the ranks' common store: seconds; and where rank 0 listens.
_TIMEOUT_KEY, _HOST_KEY = "drafthouse/timeout_s", "drafthouse/host"
# Until all ranks have started; a machine may be busy with importing torch in each.
_JOINING_S = 600.0
_MASK64 = (1 << 64) - 1
_DIGEST_BYTES = 8  # a tensor element
_CPU = torch.device("cpu")


def init_rank(
    rank: int,
    world_size: int,
    address: str,
    *,
    timeout_s: float = 60.0,
    loading_s: float = 7200.0,
) -> None:
    """Join the process group of a tensor-parallel engine; call before Engine.load.

    address: host:port of rank 0, equal on all ranks; each has the GPU of its
    number, of those that it sees.  timeout_s: a rank that is silent for so long inside a
    collective is taken for dead, and the others raise WorkerError; rank 0's counts.  loading_s: the
    same while the ranks load, of which one may be much faster than another.
    """
    num_gpus = torch.cuda.device_count()
    local_rank = rank % num_gpus if num_gpus else rank
    # transformers reads the rank's place from these when it shards the weights.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))
    if num_gpus:
        torch.cuda.set_device(local_rank)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if num_gpus else "gloo",
            store=_store(rank, world_size, address, timedelta(seconds=loading_s)),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=loading_s),
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise WorkerError(
            f"rank {rank} of {world_size} could not join its group at {address}: {error}"
        ) from error
    if rank == 0:
        _get_default_store().set(_TIMEOUT_KEY, str(timeout_s))
        _get_default_store().set(_HOST_KEY, address.rpartition(":")[0])


def _store(rank: int, world_size: int, address: str, timeout: timedelta) -> TCPStore:
    """The store where the ranks find each other: at `address`, on no other interface of rank 0.

    timeout: of what ranks ask it for later; NCCL does so at its first collective."""
    host, _, port = address.rpartition(":")
    listener = None
    if rank == 0:
        # Left to itself the store listens on all interfaces, whatever host it is given.
        listener = socket.create_server((host, int(port))).detach()
    joining = min(timeout, timedelta(seconds=_JOINING_S))
    store = TCPStore(host, int(port), world_size, rank == 0, joining, master_listen_fd=listener)
    store.set_timeout(timeout)
    return store


def distributed_config(world_size: int) -> DistributedConfig:
    """transformers' loading argument; raises ConfigError before init_rank."""
    if not dist.is_initialized() or dist.get_world_size() != world_size:
        raise ConfigError(
            f"tensor_parallel {world_size} needs a process per rank that has called "
            "cluster.engine.parallel.init_rank; start it through `drafthouse serve` or "
            "`python -m cluster.worker`",
            param="tensor_parallel",
        )
    return DistributedConfig(tp_size=world_size, tp_plan="auto")


class RankGroup:
    """This rank among the others."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        store = _get_default_store()
        with self._noticing():
            host = store.get(_HOST_KEY).decode()
            self._channel = connect(self.rank, self.world_size, host, store)
        self._outbox: list[Call] = []

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def record(self, name: str, *arguments: Any) -> None:
        """Leader: have the other ranks repeat this call before the next step."""
        self._outbox.append((name, arguments))

    def send(self, name: str, *arguments: Any) -> None:
        """Leader: hand over everything recorded, and this call last."""
        self.record(name, *arguments)
        self._shared(encode(self._outbox))
        self._outbox.clear()

    def follow(self, engine: Any) -> None:
        """Follower: repeat the leader's calls until it closes its engine.  Raises WorkerError when
        the group breaks, and for anything else that arrives."""
        while True:
            try:
                calls = decode(self._shared())
            except ProtocolError as error:
                raise WorkerError(f"rank {self.rank} cannot follow: {error.message}") from error
            for name, arguments in calls:
                if name == "close":
                    return
                getattr(engine, name)(*arguments)

    def close(self) -> None:
        """Let the other ranks go, and say and hear nothing any more."""
        if self.leads:
            self.send("close")
        self._channel.close()

    def share_layers(self, layers: Sequence[LayerSpec], like: LayerSpec) -> list[LayerSpec]:
        """Rank 0's layers; on the others as many with their windows, of the least size.

        like: a layer of the rank's model, for device and dtype.  Every rank must call."""
        windows = json.loads(self._shared(json.dumps([each.window for each in layers]).encode()))
        if self.leads:
            return list(layers)
        return [replace(like, num_kv_heads=1, head_dim=1, window=each) for each in windows]

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values; every rank must call."""
        with self._noticing():
            return self._channel.least(value)

    def all(self, answer: bool) -> bool:
        """True if all ranks say True; every rank must call."""
        return bool(self.minimum(int(answer)))

    def end_loading(self, settings: object) -> None:
        """Wait until all ranks have loaded; from now on no collective waits longer than init_rank's
        timeout_s.

        settings: which must be equal; every rank must call.  Raises as `agreeing` does."""
        with self.agreeing(settings, "settings or checkpoint"), self._noticing():
            timeout = timedelta(seconds=float(_get_default_store().get(_TIMEOUT_KEY)))
            for group in list(_world.pg_map):
                _set_pg_timeout(timeout, group)

    @contextmanager
    def agreeing(self, told: object, subject: str, device: torch.device = _CPU) -> Iterator[None]:
        """Raise WorkerError on every rank unless all have told the same, by its repr; every rank
        must call.  On a CPU what is inside begins after that; on a GPU the comparison goes before
        it on the stream, and the host, which waits for the step anyway, reads it afterwards.
        Ranks that differ discard what they have computed.

        Unlike commands it is not waited for without limit: a rank that hangs is taken for dead."""
        digest = hashlib.blake2b(repr(told).encode(), digest_size=_DIGEST_BYTES).digest()
        value = int.from_bytes(digest, "little", signed=True)
        with self._noticing():
            # ~ turns the order around and, unlike a minus, maps every int64 to an int64.
            least = torch.tensor([value, ~value], dtype=torch.int64, device=device)
            dist.all_reduce(least, op=dist.ReduceOp.MIN)
        if not least.is_cuda:
            self._settle(least, value, subject)
        yield
        if least.is_cuda:
            self._settle(least, value, subject)

    def _settle(self, least: torch.Tensor, value: int, subject: str) -> None:
        """least: of the ranks' values and of their complements."""
        with self._noticing():
            of_values, of_complements = least.tolist()
        if of_values != ~of_complements:
            raise WorkerError(
                f"the {self.world_size} tensor-parallel ranks differ in {subject} (rank "
                f"{self.rank} has {value & _MASK64:016x}); the engine must be discarded on all "
                "of them"
            )

    def _shared(self, body: bytes = b"") -> bytes:
        """The leader's body, on all ranks."""
        with self._noticing():
            return self._channel.share(body)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Inside, the error for a rank that is gone becomes a WorkerError."""
        try:
            yield
        except (RuntimeError, ValueError, OSError, EOFError) as error:
            raise WorkerError(
                f"rank {self.rank} of {self.world_size} lost its tensor-parallel group: {error}"
            ) from error


class Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, what ranks sum is this rank's part, and no other rank is waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            return args[0], FakeWork().boxed()
        return func(*args, **(kwargs or {}))


def leave_group() -> None:
    """Leave the process group, where this process is in one; safe to call twice."""
    if dist.is_initialized():
        dist.destroy_process_group()
