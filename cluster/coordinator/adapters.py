"""Which LoRA adapters new requests may ask for: the targets say it, the ingresses are told."""

from __future__ import annotations

from collections.abc import Callable

from cluster.messages import AdapterList

# What stands in reports of what was refused beside the names of drafters, which have no dot.
TARGET_CONFIG, COORDINATOR_CONFIG = "target.user_config", "coordinator.user_config"


def config_of(drafter: str) -> str:
    """Return what stands there for a drafter of the pool."""
    return f"drafter-{drafter}.user_config"


Listener = Callable[[AdapterList], None]


class AdapterNews:
    """The adapters that all targets serve, as they last said; listeners hear of every change.

    current: None = no target has said anything yet.  While there is no target it stays as it was.
    """

    def __init__(self) -> None:
        self.current: AdapterList | None = None
        self._lists: dict[str, AdapterList] = {}  # by target
        self._listeners: list[Listener] = []

    def said(self, target_id: str, adapters: AdapterList) -> None:
        """A target has told what it serves."""
        self._lists[target_id] = adapters
        self._update()

    def left(self, target_id: str) -> None:
        """A target is lost; an unknown one is no error."""
        if self._lists.pop(target_id, None) is not None and self._lists:
            self._update()

    def listen(self, listener: Listener) -> None:
        """Tell `listener` what is known, if anything is, and every change until `ignore`."""
        self._listeners.append(listener)
        if self.current is not None:
            listener(self.current)

    def ignore(self, listener: Listener) -> None:
        self._listeners.remove(listener)

    def _update(self) -> None:
        """A request may be placed at any target, so what only some of them have is not served."""
        lists = list(self._lists.values())
        served = tuple(
            each for each in lists[0].served if all(each in other.served for other in lists)
        )
        refused = next((each.refused for each in lists if each.refused), "")
        found = AdapterList(served, refused)
        if found != self.current:
            self.current = found
            for listener in list(self._listeners):
                listener(found)
