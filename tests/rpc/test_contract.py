"""What every language can read of the protos; their style is the business of `buf lint`."""

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from cluster.client.generated import common_pb2, generation_pb2
from cluster.rpc.generated import coordinator_pb2, draft_pb2, target_pb2
from docs.tools.stubs import PROTOS, contract

FILES = [
    module.DESCRIPTOR
    for module in (common_pb2, coordinator_pb2, draft_pb2, generation_pb2, target_pb2)
]
PUBLIC = "drafthouse.v1"
INTERNAL = "drafthouse.internal.v1"
# Bytes that mean nothing but themselves; whatever has parts is declared as what it is.
OPAQUE = {"drafthouse.v1.Commit.tenant"}


def messages(file: FileDescriptor) -> Iterator[Descriptor]:
    pending = list(file.message_types_by_name.values())
    while pending:
        message = pending.pop()
        pending += message.nested_types
        yield message


def fields(package: str) -> Iterator[FieldDescriptor]:
    for file in FILES:
        if file.package == package:
            for message in messages(file):
                yield from message.fields


def test_every_proto_file_is_checked():
    assert sorted(file.name for file in FILES) == sorted(
        path.relative_to(PROTOS).as_posix() for path in contract()
    )


def test_the_public_package_stands_alone():
    for file in FILES:
        if file.package == PUBLIC:
            assert all(other.package == PUBLIC for other in file.dependencies), file.name


def test_public_arrays_are_packed_fields_and_only_opaque_names_are_bytes():
    for field in fields(PUBLIC):
        if field.type == FieldDescriptor.TYPE_BYTES:
            assert field.full_name in OPAQUE
        if field.name.endswith(("token_ids", "parents")):
            assert field.is_repeated, field.full_name
            assert field.is_packed, field.full_name
            assert field.type == FieldDescriptor.TYPE_SFIXED32, field.full_name


def test_token_arrays_between_our_own_processes_are_bytes():
    arrays = [field for field in fields(INTERNAL) if field.name.endswith("token_ids")]
    assert arrays
    assert {field.type for field in arrays} == {FieldDescriptor.TYPE_BYTES}
