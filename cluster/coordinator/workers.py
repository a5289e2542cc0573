"""What is known of workers: checks of those that join, the links to them, the adapters they serve.

Whoever connects to a worker has compared its role and protocol (`cluster.rpc.channel`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Self, TypeVar

from cluster import metrics
from cluster.cpp import NEEDED
from cluster.errors import ProtocolError, WorkerError
from cluster.metrics.recorder import Recorder
from cluster.models.made_for import MadeFor, checkpoint_of
from cluster.rpc.link import Link, Outbox, run_until_first_ends
from cluster.rpc.messages import AdapterList, WorkerDescription
from cluster.spec.native import trees

log = logging.getLogger(__name__)

S = TypeVar("S")

_ALIKE = "serve the same model in the same way"
_BUILT_ALIKE = "be built alike for reproducible: true (one image, one kind of processor)"
# What stands in reports of what was refused beside the names of drafters, which have no dot.
TARGET_CONFIG, COORDINATOR_CONFIG = "target.user_config", "coordinator.user_config"


def check_target(description: WorkerDescription, others: Iterable[WorkerDescription]) -> None:
    """Raise ProtocolError unless all targets serve the same model, and where a text must be the
    same to the bit, by the same machine code."""
    for other in others:
        is_exact = description.is_reproducible
        is_same = checkpoint_of(description.model_hash) == checkpoint_of(other.model_hash)
        # Processors may differ in the weights' formats that they multiply.
        names = ["model_hash"] if is_exact or not is_same else []
        names += ["tokenizer_hash", "vocab_size", "is_reproducible"]
        names += ["native_build"] if is_exact else []
        for name in names:
            mine, theirs = getattr(description, name), getattr(other, name)
            if mine != theirs:
                remedy = _BUILT_ALIKE if name == "native_build" else _ALIKE
                raise ProtocolError(
                    f"target {description.worker_id} has {name} {mine}, target {other.worker_id} "
                    f"has {theirs}; all targets must {remedy}"
                )


def check_drafter(description: WorkerDescription, target: WorkerDescription | None) -> None:
    """Raise ProtocolError unless the drafter speaks the target's vocabulary, or any, and its trees
    can be merged here."""
    if not trees.is_available():  # nobody could merge what it sends
        raise ProtocolError(NEEDED)
    if target is None:
        return
    own, theirs = description.tokenizer_hash, target.tokenizer_hash
    if own and theirs:
        differs, has = own != theirs, f"tokenizer {own[:12]}, the target {theirs[:12]}"
    else:  # of models without a tokenizer there is no more to compare than sizes
        size = description.vocab_size
        differs = bool(size) and size != target.vocab_size
        has = f"no tokenizer and {size} tokens, the target {target.vocab_size}"
    if differs:
        raise ProtocolError(
            f"drafter {description.name} has {has}; use a draft model with the target's tokenizer"
        )


def note_foreign(
    drafters: WorkerDescription, target: WorkerDescription | None, recorder: Recorder
) -> None:
    """Warn of drafters that were made for another target, and count them.

    They may draft: what they draft is verified, but hardly ever accepted.  drafters: a pool drafter
    that joins, or the target itself, of its residents.
    """
    if target is None:
        return
    served = MadeFor(target.name, target.model_hash)
    for name, made_for in drafters.made_for.items():
        if not made_for.fits(served):
            log.warning(
                "drafter %s was made for %s, the target is %s: few of its drafts will be accepted; "
                "train one for this target, or take the drafter out",
                name,
                made_for,
                served,
            )
            recorder.add(metrics.DRAFTER_FOREIGN, drafter=name)


class Worker(Outbox[S]):
    """A worker that is led here; whatever it sends, nobody else is hurt.

    pages: of its KV cache, in use and all; None = it has not told them here.  leading: the task of
    its link.
    """

    leading: asyncio.Task[None]

    def __init__(self, worker_id: str, description: WorkerDescription, link: Link[S, Any]) -> None:
        super().__init__(link)
        self.id = worker_id
        self.description = description
        self.pages: tuple[int, int] | None = None

    def lead(
        self,
        who: str,
        read: Callable[[Self], Coroutine[Any, Any, None]],
        leave: Callable[..., None],
    ) -> asyncio.Task[None]:
        """Read and send until either ends.  leave: is called then, with what says whether it
        failed."""

        async def run() -> None:
            has_failed = False
            try:
                await run_until_first_ends(read(self), self.send_forever())
            except WorkerError as error:
                has_failed = True
                log.warning("link broke %s: %s", who, error.message)
            except Exception:
                has_failed = True
                log.exception("link failed %s", who)
            finally:
                leave(failed=has_failed)
                await self.link.close()

        self.leading = asyncio.create_task(run())
        return self.leading


def config_of(drafter: str) -> str:
    """Return what stands there for a drafter of the pool."""
    return f"drafter-{drafter}.user_config"


def served_by_all(lists: Sequence[AdapterList]) -> AdapterList:
    """Return the adapters of all targets, which have said these: a request may be placed at any."""
    served = tuple(each for each in lists[0].served if all(each in other.served for other in lists))
    return AdapterList(served, next((each.refused for each in lists if each.refused), ""))
