"""The miss log: bounded by tenant, newest first, and one entry for a client that asks again and again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvstored.clock import ManualClock
from kvstored.lifecycle import Cause
from kvstored.store.blocks.ghost import Ghost
from kvstored.telemetry import RecentMisses


def client(session_id: int, tenant: int = 0) -> Any:
    return SimpleNamespace(
        session_id=session_id,
        tenant_id=tenant,
        client_name=f"engine {session_id}",
        peer=SimpleNamespace(pid=100 + session_id),
        fingerprint_digest=b"f" * 32,
    )


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_a_tenant_that_misses_a_lot_does_not_push_out_anothers() -> None:
    clock = ManualClock(1)
    misses = RecentMisses(4, clock)
    misses.note("get", client(1, tenant=1), key(1), Cause.EVICTED, 2, 5)
    for number in range(100):
        clock.advance(s=1)
        misses.note("lookup", client(2), key(number), Cause.NEVER_STORED, 0, 1)
    newest = misses.newest(100)
    assert [(tenant, miss.key) for tenant, miss in newest] == [(0, key(n)) for n in (99, 98, 97, 96)] + [(1, key(1))]
    ((_, miss),) = misses.newest(10, tenant=1)
    assert (miss.request, miss.cause, miss.client_name, miss.pid) == ("get", Cause.EVICTED, "engine 1", 101)
    assert (miss.found_blocks, miss.asked_blocks, miss.times) == (2, 5, 1)
    assert len(misses.newest(2)) == 2


def test_the_same_again_is_counted_not_repeated() -> None:
    clock = ManualClock(1)
    misses = RecentMisses(4, clock)
    for session, number, cause in [
        (1, 7, Cause.NEVER_STORED),
        (1, 7, Cause.NEVER_STORED),
        (1, 7, Cause.EVICTED),
        (2, 7, Cause.EVICTED),
        (2, 8, Cause.EVICTED),
    ]:
        clock.advance(s=1)
        misses.note("lookup", client(session), key(number), cause, 0, 1)
    assert [miss.times for _, miss in misses.newest(9)] == [1, 1, 1, 2]
    assert misses.newest(9)[-1][1].at_ns == 1 + 2 * 10**9, "the last time counts"


def test_ghosts_are_found_by_the_first_digits_of_their_keys() -> None:
    ghost = Ghost(10)
    keys = [bytes.fromhex(text.ljust(32, "0")) for text in ("abcdef", "abcdee", "abc", "0")]
    for each in keys:
        ghost.remember(each, Cause.DROPPED, 1, 1)
    assert ghost.beginning_with("abcde") == keys[:2]
    assert ghost.beginning_with("abcdef") == keys[:1]
    assert ghost.beginning_with("ff") == []
