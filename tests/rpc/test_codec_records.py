"""A derived codec stands for both sides whole, or it is not built."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.client.generated import common_pb2
from cluster.core import TokenArray, TokenEvent
from cluster.errors import ProtocolError
from cluster.requests.fields import DraftStep
from cluster.rpc.codec import PARTS
from cluster.rpc.codec_records import ByHand, record_codec
from cluster.rpc.generated import coordinator_pb2, target_pb2
from cluster.rpc.messages import Open, WorkerDescription
from tests.support.rpc.frames_strategy import of_type, same


def record(kind: str, **fields: Any) -> Any:
    """A dataclass with these fields, of these types."""
    return dataclasses.make_dataclass(kind, fields.items())


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"made_for": int}, "made_for is repeated and holds no <class 'int'>"),
        ({"made_for": Mapping[str, int]}, "is a drafthouse.v1.MadeFor and holds no <class 'int'>"),
        ({"made_for": Mapping[int, str]}, "MadeForEntry.key holds no <class 'int'>"),
        ({"name": str}, "Odd has no field for MadeFor.model_hash"),
        ({"name": str, "model_hash": str, "age": int}, "MadeFor has no field for Odd.age"),
        ({"name": int, "model_hash": str}, "MadeFor.name holds no <class 'int'>"),
        ({"name": str | None, "model_hash": str}, "MadeFor.name holds no str | None"),
        ({"name": tuple[str, ...], "model_hash": str}, "MadeFor.name holds no tuple"),
        ({"name": TokenArray, "model_hash": str}, "MadeFor.name holds no numpy.ndarray"),
    ],
)
def test_a_field_without_a_counterpart_is_noticed_when_the_codec_is_built(
    fields: dict[str, Any], problem: str
):
    message = common_pb2.DescribeResponse if "made_for" in fields else common_pb2.MadeFor
    with pytest.raises(TypeError, match=problem.replace("|", r"\|")):
        record_codec(record("Odd", **fields), message)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WorkerDescription, common_pb2.DescribeResponse),
        (DraftStep, common_pb2.DraftStep),
        (Open, target_pb2.Open),
        (TokenEvent, coordinator_pb2.TokenEvent),
    ],
)
@settings(max_examples=10)
@given(data=st.data())
def test_every_field_goes_there_and_back(kind: type, message: type[Message], data: st.DataObject):
    codec, value = record_codec(kind, message, PARTS), data.draw(of_type(kind))
    assert same(codec.decode(codec.encode(value)), value)


@dataclasses.dataclass
class Held:
    """num_beams has no presence; length_penalty has."""

    num_beams: int
    length_penalty: float = 2.5

    @property
    def early_stopping(self) -> int:
        return 0


def test_an_absent_field_has_the_default_and_a_zero_is_not_absent():
    codec = record_codec(Held, common_pb2.BeamSearch)
    assert codec.decode(common_pb2.BeamSearch(num_beams=3)) == Held(3, 2.5)
    assert codec.decode(common_pb2.BeamSearch(length_penalty=0.0)).length_penalty == 0.0
    assert codec.encode(Held(3, 0.0)).HasField("length_penalty")
    with pytest.raises(ProtocolError, match="params is absent"):
        record_codec(Open, target_pb2.Open, PARTS).decode(target_pb2.Open())


def test_a_field_by_hand_is_written_by_its_own_function_or_not_at_all():
    for encode, sent in ((lambda held: {"num_beams": 2 * held.num_beams}, 6), (None, 0)):
        hand = ByHand(("num_beams",), encode, lambda message: message.num_beams)
        codec = record_codec(Held, common_pb2.BeamSearch, by_hand={"num_beams": hand})
        assert codec.decode(codec.encode(Held(3))).num_beams == sent
