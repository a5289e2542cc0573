"""Counts what each key's requests have used, under the key's name."""

from __future__ import annotations

from cluster import metrics
from cluster.metrics.recorder import Recorder
from cluster.metrics.told import Tokens

# Each name is three series; a file may have thousands of keys.
MAX_NAMES = 100
# No key can have it.
OTHER = "(other)"


class KeyUsage:
    """The counts of one ingress process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._names: set[str] = set()

    def count(self, name: str, tokens: Tokens) -> None:
        """Count a request that has ended; without a name there are no keys to tell apart."""
        if not name:
            return
        if name not in self._names and len(self._names) >= MAX_NAMES:
            name = OTHER
        self._names.add(name)
        for kind, count in tokens.items():
            self._recorder.add(metrics.KEY_TOKENS, count, key=name, kind=kind)
