"""Several leases as one: their blocks in order, one validity, one renewal, one release; and what ends early is cut."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore_client.get import _kept
from kvstore_client.lease import Lease, LeasedBlock, joined
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.kv_layout import KVLayout

MODEL = Fingerprint("m", "w")


class Grant:
    def __init__(self, *, renewed_s: float | None = 60.0) -> None:
        self.block_tokens, self.layer_count, self.layout = 64, 2, KVLayout(MODEL, MODEL.groups[0])
        self.name = str(id(self))
        self.alive, self.released, self.renewals = True, 0, 0
        self.renewed_s = renewed_s

    def is_alive(self) -> bool:
        return self.alive

    def renew(self) -> float | None:
        self.renewals += 1
        return self.renewed_s

    def release(self) -> None:
        self.released += 1

    def chain(self, tokens: Any) -> Any:
        raise AssertionError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def part(grant: Grant, clock: Clock, *values: int, expires_in_s: float = 60.0, reason: str = "") -> Lease:
    blocks = [LeasedBlock(np.full(4096 + 8, value, np.uint8), 0, 8, 1, bytes([value]) * 16) for value in values]
    return Lease(blocks, grant, expires_in_s=expires_in_s, reason=reason, promoted_bytes=len(values), clock=clock)


def test_the_whole_has_all_blocks_and_ends_with_the_first_part() -> None:
    clock, first, second = Clock(), Grant(), Grant(renewed_s=20.0)
    whole = joined([part(first, clock, 1, 2), part(second, clock, 3, expires_in_s=30.0, reason="late")], clock)
    assert [int(whole.payload(block)[0]) for block in range(len(whole))] == [1, 2, 3]
    assert (whole.tokens, whole.payload_bytes, whole.reason, whole.promoted_bytes) == (192, 24, "late", 3)
    clock.now = 29.0
    assert whole.valid
    clock.now = 29.6
    assert not whole.valid and not whole.renew(), "over is over"
    clock.now = 1.0
    assert whole.renew() and (first.renewals, second.renewals) == (1, 1)
    clock.now = 21.0
    assert not whole.valid, "the shorter of the two counts"
    clock.now = 2.0
    first.alive = False
    assert not whole.valid
    whole.release()
    whole.release()
    assert (first.released, second.released) == (1, 1)


def test_a_part_without_blocks_gives_its_reason_alone() -> None:
    clock, first = Clock(), Grant()
    whole = joined([part(first, clock, 1), Lease(reason="throttled")], clock)
    assert (len(whole), whole.reason, whole.valid) == (1, "throttled", True)
    nothing = joined([Lease(reason="deadline")], clock)
    assert (len(nothing), nothing.reason, nothing.valid) == (0, "deadline", False)


def test_earlier_parts_are_renewed_while_later_ones_load() -> None:
    clock, first, second = Clock(), Grant(), Grant()
    parts = [part(first, clock, 1)]
    clock.now = 40.0
    parts.append(part(second, clock, 2))
    assert _kept(parts) == parts and (first.renewals, second.renewals) == (1, 0)
    clock.now = 90.0
    assert parts[0].valid


def test_what_follows_a_part_that_ended_is_given_back() -> None:
    clock = Clock()
    grants = [Grant(), Grant(renewed_s=None), Grant()]
    parts = [part(grant, clock, number) for number, grant in enumerate(grants)]
    clock.now = 50.0
    kept = _kept(parts)
    assert (kept[:-1], len(kept[-1]), kept[-1].reason) == (parts[:1], 0, "late")
    assert [grant.released for grant in grants] == [0, 1, 1]


def test_parts_whose_daemon_is_gone_say_so() -> None:
    clock, gone = Clock(), Grant()
    gone.alive = False
    kept = _kept([part(gone, clock, 1), Lease(reason="no_daemon")])
    assert (len(kept), kept[0].reason) == (1, "no_daemon")
