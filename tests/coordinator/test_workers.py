"""Targets that would not say the same do not serve together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cluster.coordinator.workers import check_target
from cluster.errors import ProtocolError
from cluster.messages import WorkerDescription

TARGET = WorkerDescription("first", "target", "m", model_hash="ab", native_build="b1")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"model_hash": "cd"}, "has model_hash cd"),
        ({"model_hash": "ab|weights=int8"}, None),  # a processor that cannot has wider ones
        ({"model_hash": "cd|weights=int8"}, r"has model_hash cd\|weights=int8"),
        ({"native_build": "b2"}, None),  # rounding may differ: nobody was promised anything
        ({"is_reproducible": True}, "has is_reproducible True"),
    ],
)
def test_targets_of_one_model_fit_whatever_their_builds(
    fields: dict[str, Any], reason: str | None
) -> None:
    other = dataclasses.replace(TARGET, worker_id="second", **fields)
    if reason is None:
        check_target(other, [TARGET])
        return
    with pytest.raises(ProtocolError, match=reason):
        check_target(other, [TARGET])


def test_reproducible_targets_of_different_builds_are_told_apart() -> None:
    first = dataclasses.replace(TARGET, is_reproducible=True)
    same = dataclasses.replace(first, worker_id="second")
    check_target(same, [first])
    with pytest.raises(ProtocolError, match=r"native_build b2, target first has b1.*one image"):
        check_target(dataclasses.replace(same, native_build="b2"), [first, same])
    with pytest.raises(
        ProtocolError, match=r"has model_hash ab\|weights=int8, target first has ab"
    ):
        check_target(dataclasses.replace(same, model_hash="ab|weights=int8"), [first])
