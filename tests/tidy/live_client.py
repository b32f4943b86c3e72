"""The program that test_tidy_compatibility runs in an environment of another protobuf and grpcio: load, round-trip, use
a daemon.

Run as a program with a socket directory; prints one JSON line. Every message type that there is goes through bytes
and back. Needs only what the base install needs.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import google.protobuf
import grpc
import numpy as np
from google.protobuf.message import Message

_PROTOS = ("kvstore", "handshake", "admin", "unary")
_SAMPLES = {"int": 7, "str": "seven", "bytes": b"\x07" * 16, "float": 0.5, "bool": True}


def filled(kind: type[Message], depth: int = 0) -> Message:
    """A message with something in every field, as far as recursion allows."""
    message: Any = kind()
    for field in kind.DESCRIPTOR.fields:
        target = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name
            if entry["value"].message_type is None:
                target[_sample(entry["key"])] = _sample(entry["value"])
        elif field.message_type is not None:
            if depth < 4:
                inner = filled(field.message_type._concrete_class, depth + 1)
                target.append(inner) if _is_list(target) else target.CopyFrom(inner)
        else:
            sample = 1 if field.enum_type is not None else _sample(field)
            target.append(sample) if _is_list(target) else setattr(message, field.name, sample)
    return kind.FromString(message.SerializeToString()) if depth == 0 else message


def _is_list(target: object) -> bool:
    return hasattr(target, "append")


def _sample(field: Any) -> object:
    kinds = {field.CPPTYPE_STRING: "bytes" if field.type == field.TYPE_BYTES else "str", field.CPPTYPE_BOOL: "bool"}
    kinds |= {field.CPPTYPE_DOUBLE: "float", field.CPPTYPE_FLOAT: "float"}
    return _SAMPLES[kinds.get(field.cpp_type, "int")]


def round_trips() -> int:
    count = 0
    for name in _PROTOS:
        module = import_module(f"kvstore_proto.v1.{name}_pb2")
        for descriptor in module.DESCRIPTOR.message_types_by_name.values():
            kind = descriptor._concrete_class
            message = filled(kind)
            assert kind.FromString(message.SerializeToString()) == message, descriptor.full_name
            assert message.ByteSize() or not descriptor.fields, descriptor.full_name
            count += 1
    for name in ("kvstore", "admin", "unary"):
        import_module(f"kvstore_proto.v1.{name}_pb2_grpc")
    return count


def use(socket_dir: Path) -> None:
    """Store by shared memory, read by unary calls, and ask after the health, with this environment's libraries."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    import kvstore_client
    from kvstore_client import Fingerprint, LayerGroup
    from kvstore_proto.v1 import unary_pb2, unary_pb2_grpc

    model = Fingerprint("compatibility", google.protobuf.__version__, groups=(LayerGroup(0, "full", 0, (0, 1), 32),))
    tokens = list(range(192))
    payloads = [np.full(model.payload_bytes(), block, np.uint8) for block in range(3)]
    with kvstore_client.connect(socket_dir, fingerprint=model, required=True, deadline_s=20.0) as session:
        receipt = session.put(tokens, payloads=payloads, wait="settled")
        assert receipt.statuses == ["stored"] * 3, receipt
        with session.get(tokens) as lease:
            assert [lease.payload(block).tobytes() for block in range(3)] == [item.tobytes() for item in payloads]
    with grpc.insecure_channel(f"unix:{socket_dir}/unary.sock") as channel:
        unary: Any = unary_pb2_grpc.KVStoreUnaryStub(channel)
        chain = unary_pb2.Chain(fingerprint=model.canonical(), token_ids=tokens)
        got = unary.Get(unary_pb2.UnaryGetRequest(chain=chain), timeout=20)
        assert list(got.payloads) == [item.tobytes() for item in payloads]
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=20).status == 1


if __name__ == "__main__":
    messages = round_trips()
    use(Path(sys.argv[1]))
    print(json.dumps({"protobuf": google.protobuf.__version__, "grpcio": grpc.__version__, "messages": messages}))
