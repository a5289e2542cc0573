"""A derived codec stands for both sides whole, or it is not built."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from cluster.client.generated import common_pb2
from cluster.client.generated import generation_pb2 as pb
from cluster.core import FloatArray, TokenArray, TokenTree
from cluster.errors import ProtocolError
from cluster.models.made_for import MadeFor
from cluster.requests.beam_spec import BeamEnd
from cluster.rpc.codec_records import ByHand, record_codec
from tests.support.rpc.frames_strategy import same


def record(kind: str, **fields: Any) -> Any:
    """A dataclass with these fields, of these types."""
    return dataclasses.make_dataclass(kind, fields.items())


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
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
) -> None:
    with pytest.raises(TypeError, match=problem.replace("|", r"\|")):
        record_codec(record("Odd", **fields), common_pb2.MadeFor)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (record("Odd", token_ids=FloatArray, parents=TokenArray), common_pb2.TokenTree),
        (record("Odd", token_ids=int, parents=TokenArray), common_pb2.TokenTree),
        (record("Odd", token_ids=tuple[int, int], parents=TokenArray), common_pb2.TokenTree),
        (record("Odd", token_ids=Mapping[int, int], parents=TokenArray), common_pb2.TokenTree),
        (record("Odd", messages=tuple[str, ...]), pb.ChatMessages),
        (record("Odd", messages=tuple[MadeFor, ...]), pb.ChatMessages),
        (BeamEnd, common_pb2.BeamEnd),
    ],
)
def test_repeated_fields_and_messages_hold_what_has_their_parts(kind: Any, message: Any) -> None:
    with pytest.raises(TypeError, match=r"holds no|has no field for"):
        record_codec(kind, message)


def test_no_field_of_a_message_stands_for_two() -> None:
    kind = record("Twice", name=str, other=str, model_hash=str)
    with pytest.raises(TypeError, match=r"MadeFor has no field for Twice\.other"):
        record_codec(kind, common_pb2.MadeFor, names={"other": "name"})


def test_repeated_fields_are_tuples_or_arrays_of_ones_own() -> None:
    tree = TokenTree.chain([3, 4])
    codec = record_codec(TokenTree, common_pb2.TokenTree)
    message = codec.encode(tree)
    read = codec.decode(message)
    assert same(read, tree)
    read.token_ids[0] = 5
    nodes = record("Nodes", token_ids=tuple[int, ...], parents=tuple[int, ...])
    assert record_codec(nodes, common_pb2.TokenTree).decode(message) == nodes((3, 4), (-1, 0))


@dataclasses.dataclass
class Held:
    """num_beams has no presence; length_penalty has."""

    num_beams: int
    length_penalty: float = 2.5

    @property
    def early_stopping(self) -> int:
        return 0


@dataclasses.dataclass
class Bare(Held):
    length_penalty: float = dataclasses.field()


def test_an_absent_field_has_the_default_and_a_zero_is_not_absent() -> None:
    codec = record_codec(Held, common_pb2.BeamSearch)
    assert codec.decode(common_pb2.BeamSearch(num_beams=3)) == Held(3, 2.5)
    assert codec.decode(common_pb2.BeamSearch(length_penalty=0.0)).length_penalty == 0.0
    assert codec.encode(Held(3, 0.0)).HasField("length_penalty")


def test_an_absent_field_without_a_default_is_refused() -> None:
    with pytest.raises(ProtocolError, match="length_penalty is absent"):
        record_codec(Bare, common_pb2.BeamSearch).decode(common_pb2.BeamSearch())


@dataclasses.dataclass
class Plain:
    """A hash that follows from the name."""

    name: str

    @property
    def model_hash(self) -> str:
        return self.name * 2


def test_a_property_is_written_and_not_read() -> None:
    codec = record_codec(Plain, common_pb2.MadeFor)
    assert codec.encode(Plain("ab")) == common_pb2.MadeFor(name="ab", model_hash="abab")
    assert codec.decode(common_pb2.MadeFor(name="ab", model_hash="c")) == Plain("ab")


def test_a_field_may_stand_for_several_by_hand() -> None:
    both = ByHand(
        ("name", "model_hash"),
        lambda record: dict(zip(("name", "model_hash"), record.parts, strict=True)),
        lambda message: (message.name, message.model_hash),
    )
    kind = record("Parts", parts=tuple[str, str])
    codec = record_codec(kind, common_pb2.MadeFor, by_hand={"parts": both})
    message = codec.encode(kind(("a", "b")))
    assert message == common_pb2.MadeFor(name="a", model_hash="b")
    assert codec.decode(message) == kind(("a", "b"))
