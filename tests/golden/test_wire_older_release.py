"""The wire against the previous release: `wire-0.1.0.binpb` holds its messages as descriptors, never to be changed.

An old peer is played by messages made from those descriptors: what it writes must be read by today's code and the other
way round, and nothing of it may have been renumbered, retyped or removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from kvstore_proto.v1 import admin_pb2, handshake_pb2, kvstore_pb2
from tests.golden.test_wire_vectors import VECTORS

_OLD = descriptor_pool.DescriptorPool()
for _file in FileDescriptorSet.FromString(Path(__file__).with_name("wire-0.1.0.binpb").read_bytes()).file:
    _OLD.Add(_file)
_FILES = {"kvstore": kvstore_pb2, "handshake": handshake_pb2, "admin": admin_pb2}


def _messages(container: Any) -> Iterator[Descriptor]:
    nested = getattr(container, "message_types_by_name", None) or getattr(container, "nested_types_by_name", {})
    for message in nested.values():
        yield message
        yield from _messages_of(message)


def _messages_of(message: Descriptor) -> Iterator[Descriptor]:
    for nested in message.nested_types_by_name.values():
        yield nested
        yield from _messages_of(nested)


def _old_file(name: str) -> Any:
    return _OLD.FindFileByName(f"kvstore_proto/v1/{name}.proto")


def _old_class(full_name: str) -> Any:
    return message_factory.GetMessageClass(_OLD.FindMessageTypeByName(full_name))


def _shape(field: FieldDescriptor) -> tuple[object, ...]:
    kind = field.message_type or field.enum_type
    oneof = field.containing_oneof.name if field.containing_oneof else ""
    return field.name, field.type, _is_repeated(field), kind.full_name if kind else "", oneof


def _is_repeated(field: FieldDescriptor) -> bool:
    known = getattr(field, "is_repeated", None)  # the property came with protobuf 6.31, the label goes with a later one
    return field.label == FieldDescriptor.LABEL_REPEATED if known is None else bool(known)


@pytest.mark.parametrize("name", sorted(_FILES))
def test_no_field_of_the_old_release_was_removed_renumbered_or_retyped(name: str) -> None:
    new_pool = _FILES[name].DESCRIPTOR.pool
    compared = 0
    for old in _messages(_old_file(name)):
        new = new_pool.FindMessageTypeByName(old.full_name)
        for number, field in old.fields_by_number.items():
            assert _shape(new.fields_by_number[number]) == _shape(field), f"{old.full_name} field {number}"
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("name", sorted(_FILES))
def test_no_enum_value_or_method_of_the_old_release_was_changed(name: str) -> None:
    old_file, new_file = _old_file(name), _FILES[name].DESCRIPTOR
    for old in old_file.enum_types_by_name.values():
        new = new_file.enum_types_by_name[old.name]
        for value in old.values:
            assert new.values_by_number[value.number].name == value.name
    for service in old_file.services_by_name.values():
        for method in service.methods:
            today = new_file.services_by_name[service.name].methods_by_name[method.name]
            assert today.input_type.full_name == method.input_type.full_name
            assert today.output_type.full_name == method.output_type.full_name


@pytest.mark.parametrize("name", sorted(VECTORS))
def test_an_old_peer_reads_what_we_write_and_keeps_what_it_does_not_know(name: str) -> None:
    message, _ = VECTORS[name]
    try:
        old = _old_class(message.DESCRIPTOR.full_name)()
    except KeyError:
        pytest.skip(f"{message.DESCRIPTOR.full_name} is newer than that release")
    old.ParseFromString(message.SerializeToString())
    known = {number for number, _ in ((field.number, value) for field, value in old.ListFields())}
    assert known <= {field.number for field, _ in message.ListFields()}
    # Sent on by the old peer, unknown fields included, it is our message again.
    assert type(message).FromString(old.SerializeToString()) == message


def test_we_read_what_an_old_client_asks_as_it_meant_it() -> None:
    request = _old_class("kvstore.v1.Request")()
    request.request_id = 3
    request.acquire.set.keys = bytes(32)
    request.acquire.max_wait_ms = 100
    today = kvstore_pb2.Request.FromString(request.SerializeToString())
    assert (today.request_id, today.WhichOneof("op"), today.acquire.max_wait_ms) == (3, "acquire", 100)
    assert not today.acquire.mapped_only, "an old client waits for promotion"
