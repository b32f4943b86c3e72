"""Monotonic counters by name. The names are fixed here, documented, and shown by `kvctl status`."""

from __future__ import annotations

COUNTERS = {
    "lookups": "lookup requests answered",
    "lookup_keys": "keys asked for in lookups",
    "lookup_hit_keys": "keys found usable in lookups",
    "acquires": "acquire requests answered",
    "acquired_blocks": "blocks handed out under leases",
    "acquire_timeouts": "acquires that ended before their promotions",
    "stored_blocks": "blocks committed and published",
    "stored_bytes": "payload bytes of those",
    "present_blocks": "puts of blocks that were there already",
    "throttled_blocks": "puts refused for want of room",
    "durable_blocks": "blocks answered durable",
    "promoted_blocks": "blocks moved up for an acquire or a prefetch",
    "promoted_bytes": "bytes of those",
    "prefetched_blocks": "blocks moved up by prefetch alone",
    "written_back_blocks": "blocks written to NVMe",
    "written_back_bytes": "bytes of those",
    "evicted_blocks": "blocks that left their last tier by policy",
    "expired_blocks": "blocks that left by their time to live",
    "corrupt_blocks": "blocks found damaged and quarantined",
    "orphaned_blocks": "descendants of damaged blocks, dropped with them",
    "read_failures": "reads that a tier refused",
    "write_failures": "writes that a tier refused",
    "expired_leases": "leases that lapsed",
    "expired_reservations": "reservations that lapsed",
    "sessions_opened": "handshakes that succeeded",
    "sessions_refused": "handshakes that did not",
    "grpc_payload_bytes": "bytes of K/V that travelled inside gRPC: 0 but for unary calls",
}


class Counters:
    """Attribute-like access by name; an unknown name is a bug and raises KeyError."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = dict.fromkeys(COUNTERS, 0)

    def add(self, name: str, amount: int = 1) -> None:
        self._values[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def snapshot(self) -> dict[str, int]:
        return dict(self._values)
