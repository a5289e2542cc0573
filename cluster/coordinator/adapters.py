"""Which LoRA adapters new requests may ask for: the targets say it, the ingresses are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.messages import AdapterList

# What stands in reports of what was refused beside the names of drafters, which have no dot.
TARGET_CONFIG, COORDINATOR_CONFIG = "target.user_config", "coordinator.user_config"


def config_of(drafter: str) -> str:
    """Return what stands there for a drafter of the pool."""
    return f"drafter-{drafter}.user_config"


class AdapterNews:
    """The adapters that all targets serve, as they last said.

    current: None = no target has said anything yet.  While there is no target it stays as it was.
    listeners: hear of every change.
    """

    def __init__(self) -> None:
        self.current: AdapterList | None = None
        self.listeners: list[Callable[[AdapterList], None]] = []

    def update(self, lists: Sequence[AdapterList]) -> None:
        """These are what the targets have said that are here."""
        if not lists:
            return
        # A request may be placed at any target, so what only some of them have is not served.
        served = tuple(
            each for each in lists[0].served if all(each in other.served for other in lists)
        )
        refused = next((each.refused for each in lists if each.refused), "")
        found = AdapterList(served, refused)
        if found != self.current:
            self.current = found
            for listener in list(self.listeners):
                listener(found)
