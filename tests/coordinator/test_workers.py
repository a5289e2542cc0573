"""Workers that would not say the same, or do not speak one vocabulary, do not serve together."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from cluster.coordinator.workers import check_drafter, check_target
from cluster.errors import ProtocolError
from cluster.rpc.link import memory_pair
from cluster.rpc.messages import WorkerDescription
from tests.support.coordinator.house import at_work
from tests.support.coordinator.toys import ToyTarget, target_description

TARGET = WorkerDescription("first", "target", "m", model_hash="ab", native_build="b1")


@pytest.mark.parametrize(
    ("is_reproducible", "fields", "reason"),
    [
        (False, {"model_hash": "cd"}, "has model_hash cd"),
        (False, {"model_hash": "ab|weights=int8"}, ""),  # a processor that cannot has wider ones
        (False, {"model_hash": "cd|weights=int8"}, "has model_hash cd|weights=int8"),
        (False, {"native_build": "b2"}, ""),  # rounding may differ: nobody was promised anything
        (False, {"is_reproducible": True}, "has is_reproducible True"),
        (True, {}, ""),
        (True, {"native_build": "b2"}, "native_build b2, target first has b1; all targets must be"),
        (True, {"model_hash": "ab|weights=int8"}, "ab|weights=int8, target first has ab"),
    ],
)
def test_targets_of_one_model_fit_and_where_bits_count_of_one_build(
    *, is_reproducible: bool, fields: dict[str, Any], reason: str
):
    first = dataclasses.replace(TARGET, is_reproducible=is_reproducible)
    other = dataclasses.replace(first, **{"worker_id": "second", **fields})
    refused(reason, check_target, other, [first, first])


@pytest.mark.parametrize(
    ("tokenizer_hash", "vocab_size", "reason"),
    [
        ("t", 7, ""),
        ("other", 0, "tokenizer other, the target t"),
        ("", 0, ""),
        ("", 32, ""),
        ("", 33, "no tokenizer and 33 tokens, the target 32"),
    ],
)
def test_a_drafter_speaks_the_targets_vocabulary_or_any(
    tokenizer_hash: str, vocab_size: int, reason: str
):
    own = WorkerDescription(
        "d", "drafter", "d", tokenizer_hash=tokenizer_hash, vocab_size=vocab_size
    )
    check_drafter(own, None)  # while there is no target nothing is known
    refused(reason, check_drafter, own, target_description())


def refused(reason: str, check: Callable[..., None], *given: Any) -> None:
    """reason: "" = it is not refused."""
    if not reason:
        check(*given)
        return
    with pytest.raises(ProtocolError, match=re.escape(reason)):
        check(*given)


async def test_a_coordinator_says_of_itself_what_all_of_its_targets_can():
    async with at_work(max_running_sequences=7) as stage:
        stage.add_target(ToyTarget(), "short", max_context_len=64)
        own = {"role": "coordinator", "name": "", "max_running_sequences": 7}
        served = target_description(stage.status()["id"], max_context_len=64)
        assert stage.coordinator.describe() == dataclasses.replace(served, **own)


async def test_a_target_with_another_model_is_refused_beside_the_first():
    async with at_work() as stage:
        other = dataclasses.replace(target_description("two"), model_hash="other")
        with pytest.raises(ProtocolError, match="model_hash"):
            stage.coordinator.add_target("two", other, memory_pair()[0])
