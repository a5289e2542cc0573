"""Short trainings in several ways, on the same recorded answers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from cluster.train import traffic
from cluster.train.chat_heads import HeadSettings
from cluster.train.traffic import Traffic, learn_from_traffic
from cluster.train.trainer import Budget

_STEPS = 150
# By name: the loss, and the share of original answers.
_WAYS = {
    "acceptance, mix 0.5": ("acceptance", 0.5),
    "kl, mix 0.5": ("kl", 0.5),
    "acceptance, no originals": ("acceptance", 1e-6),
}


def compared(target: str, drafter: str, recorded: Path, originals: Path) -> dict[str, Any]:
    """The summary of a record, by way."""
    found: dict[str, Any] = {"steps": _STEPS}
    for name, (loss, mix) in _WAYS.items():
        # The original answers that are there suffice.
        settings = HeadSettings(num_answer_tokens=1, weights="", loss=loss)
        # One that forgets is measured as well.
        unchecked = patch.object(traffic, "_check", lambda before, after: None)
        with unchecked, TemporaryDirectory() as folder:
            learned = learn_from_traffic(
                target, Traffic(recorded, drafter, mix), originals.parent, Path(folder) / "new",
                settings, Budget(steps=_STEPS),
            )  # fmt: skip
        assert learned is not None
        found["before"] = {domain: asdict(along) for domain, along in learned.before.items()}
        found[name] = {domain: asdict(along) for domain, along in learned.after.items()}
    return found
