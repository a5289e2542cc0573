"""The frames between ingress and coordinator.  Those of workers stand in `cluster.core`."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core import Request, TokenEvent


@dataclass(frozen=True, slots=True, eq=False)
class SubmitFrame:
    """Ingress to coordinator: new requests, and ids of requests whose client went away.

    A request that cannot be admitted is answered by a finished TokenEvent with an error code.
    Cancelling an unknown or finished request is no error.
    """

    requests: tuple[Request, ...] = ()
    cancelled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class EventFrame:
    """Coordinator to ingress: what the requests of this stream got since the last frame."""

    events: tuple[TokenEvent, ...] = ()
