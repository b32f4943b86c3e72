"""The verbs' pure parts: how far a chain can be restored, and what a request must look like."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.matching import restorable_blocks
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.sessions import ClientSessions
from kvstored.clients.staging import StagingPool
from kvstored.clients.tenants import Peer
from kvstored.clock import ManualClock
from kvstored.rpc.verbs.validate import keys_of, known_group, payload_size

ROWS = st.lists(st.sampled_from([-1, 3]), max_size=12)


def restorable(rows: Sequence[int], match: int, window: int, blocks: int) -> bool:
    """Return by the definition whether the state after `blocks` blocks can be had from what is present."""
    here = [row >= 0 for row in rows[:blocks]]
    if match == pb.MATCH_EXACT:
        return here[-1]
    if match == pb.MATCH_WINDOW:
        return all(here[-max(window, 1) :])
    return all(here)


@given(ROWS, st.sampled_from([pb.MATCH_PREFIX, pb.MATCH_WINDOW, pb.MATCH_EXACT, 9]), st.integers(0, 5))
def test_usable_blocks_is_the_longest_restorable_prefix(rows: list[int], match: int, window: int) -> None:
    longest = max((n for n in range(1, len(rows) + 1) if restorable(rows, match, window, n)), default=0)
    assert restorable_blocks([row >= 0 for row in rows], match, window) == longest
    if longest < len(rows):
        assert rows[longest] < 0, "the key after the usable ones is the one whose absence is explained"


def kind_of(call: Any, *arguments: Any) -> ErrorKind:
    with pytest.raises(KVStoreError) as caught:
        call(*arguments)
    return caught.value.kind


def test_packed_keys() -> None:
    assert keys_of(b"", 1) == []
    assert keys_of(b"a" * 16 + b"b" * 16, 2) == [b"a" * 16, b"b" * 16]
    assert kind_of(keys_of, b"a" * 17, 4) is ErrorKind.INVALID
    assert kind_of(keys_of, b"a" * 48, 2) is ErrorKind.TOO_LARGE


FIXED = Fingerprint("m", "w", groups=(LayerGroup(0, layers=(0, 1), bytes_per_token_per_layer=8), LayerGroup(3)))
SESSION: Any = SimpleNamespace(fingerprint=FIXED)


def test_groups_and_sizes() -> None:
    known_group(SESSION, 3)
    assert kind_of(known_group, SESSION, 1) is ErrorKind.INVALID
    payload_size(SESSION, 0, 1024, 1 << 20)
    payload_size(SESSION, 3, 77, 1 << 20)  # open: any size
    assert kind_of(payload_size, SESSION, 0, 1025, 1 << 20) is ErrorKind.INVALID
    assert kind_of(payload_size, SESSION, 3, 0, 1 << 20) is ErrorKind.INVALID
    assert kind_of(payload_size, SESSION, 3, 1 << 21, 1 << 20) is ErrorKind.TOO_LARGE
    assert kind_of(payload_size, SESSION, 0, 1024, 1000) is ErrorKind.TOO_LARGE


class Holdings:
    """The leases and reads of sessions in the store: the test sees what is given back."""

    def __init__(self) -> None:
        self.given_back: list[str] = []
        self.clock = ManualClock()
        self.config = SimpleNamespace(limits=SimpleNamespace(lease_ttl_ms=1000, clients_per_tenant=9))
        self.leases = SimpleNamespace(release_session=lambda number: self.given_back.append("leases"))
        self.reservations = SimpleNamespace(
            held_bytes=lambda number: 0, end_session=lambda number: self.given_back.append("slots")
        )
        self.residency = SimpleNamespace(tenant=lambda name: 0)


DIRECTORY: Any = SimpleNamespace(
    remember=lambda print_: b"digest", known_number=lambda digest: 9, fingerprint_number=lambda digest: 3,
    family=lambda print_: frozenset(),
)  # fmt: skip
TENANT: Any = SimpleNamespace(name="t", index_name="t", roots=lambda print_: [b"", b""])


def table(held: Any, former: Any = None, last_id: int = 0) -> ClientSessions:
    shares: Any = SimpleNamespace(set=lambda *_: None)
    weights: Any = SimpleNamespace(admit=lambda *_, **__: None)
    return ClientSessions(held, DIRECTORY, shares, StagingPool(0, 0), weights, former, last_id)


def test_a_closed_session_is_removed_and_its_streams_are_notified_once() -> None:
    held = Holdings()
    sessions = table(held)
    session = sessions.open(TENANT, FIXED, Peer(0, 1, 1), "a", 0)
    session.on_close.append(lambda: held.given_back.append("stream"))
    assert sessions.find(session.token) is session and len(sessions) == 1 and session.fingerprint_id == 3
    assert sessions.find(bytes(16)) is None and sessions.find(b"") is None
    sessions.close(session)
    sessions.close(session)
    assert held.given_back == ["stream", "leases"] and sessions.find(session.token) is None and not sessions.all()


@pytest.mark.parametrize("keeps", [False, True])
def test_leases_end_with_their_client_unless_the_next_process_is_to_find_them(keeps: bool) -> None:
    held, left = Holdings(), list[Any]()
    sessions = table(held, SimpleNamespace(keeps_leases=keeps, left=left.append))
    session = sessions.open(TENANT, FIXED, Peer(0, 1, 1), "a", 0)
    sessions.close(session)
    assert (held.given_back, left) == (([], []) if keeps else (["leases"], [session]))


def test_ids_are_never_given_twice() -> None:
    sessions = table(Holdings(), last_id=7)
    found = [sessions.open_call(TENANT, FIXED, "call") for _ in range(100)]
    assert {session.session_id for session in found} == set(range(8, 108))
    assert len({session.token for session in found}) == 100 and found[0].fingerprint_id == 9 and not sessions.all()
