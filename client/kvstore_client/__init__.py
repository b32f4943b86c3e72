"""The client of the daemon: `connect()` and the session it returns, for engines to import.

Importing the package loads nothing heavy: NumPy is loaded by the first name that needs it, gRPC by the first stream
that uses it. The package does not run a model, or know where the daemon keeps blocks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore_client.arguments import PutTerms
    from kvstore_client.arrays import LeaseArray
    from kvstore_client.entry import connect
    from kvstore_client.errors import DaemonUnavailable
    from kvstore_client.lease import Lease
    from kvstore_client.lease_stream import LayerStreams, LeasedRun, LeaseStream
    from kvstore_client.receipt import PutReceipt
    from kvstore_client.results import Deleted, Lookup, Prefetched, ResumePoint, Statistics
    from kvstore_client.session import Session
    from kvstore_client.slot_arrays import Slot, by_arrays
    from kvstore_client.trace import traced
    from kvstore_proto.errors import ErrorKind, KVStoreError
    from kvstore_proto.fingerprint import Fingerprint, LayerGroup, StatePart
    from kvstore_proto.identity import BlockKeys

_HOMES = {
    "BlockKeys": "kvstore_proto.identity",
    "DaemonUnavailable": "kvstore_client.errors",
    "Deleted": "kvstore_client.results",
    "ErrorKind": "kvstore_proto.errors",
    "Fingerprint": "kvstore_proto.fingerprint",
    "KVStoreError": "kvstore_proto.errors",
    "LayerGroup": "kvstore_proto.fingerprint",
    "LayerStreams": "kvstore_client.lease_stream",
    "Lease": "kvstore_client.lease",
    "LeaseArray": "kvstore_client.arrays",
    "LeaseStream": "kvstore_client.lease_stream",
    "LeasedRun": "kvstore_client.lease_stream",
    "Lookup": "kvstore_client.results",
    "Prefetched": "kvstore_client.results",
    "PutTerms": "kvstore_client.arguments",
    "PutReceipt": "kvstore_client.receipt",
    "ResumePoint": "kvstore_client.results",
    "Session": "kvstore_client.session",
    "Slot": "kvstore_client.slot_arrays",
    "StatePart": "kvstore_proto.fingerprint",
    "Statistics": "kvstore_client.results",
    "by_arrays": "kvstore_client.slot_arrays",
    "connect": "kvstore_client.entry",
    "traced": "kvstore_client.trace",
}

__all__ = [
    "BlockKeys",
    "DaemonUnavailable",
    "Deleted",
    "ErrorKind",
    "Fingerprint",
    "KVStoreError",
    "LayerGroup",
    "LayerStreams",
    "Lease",
    "LeaseArray",
    "LeaseStream",
    "LeasedRun",
    "Lookup",
    "Prefetched",
    "PutTerms",
    "PutReceipt",
    "ResumePoint",
    "Session",
    "Slot",
    "StatePart",
    "Statistics",
    "by_arrays",
    "connect",
    "traced",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
