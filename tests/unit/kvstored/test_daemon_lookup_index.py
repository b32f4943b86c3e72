"""The daemon's tables in parts: built in slices beside changes, counted, shared by a tenant's sessions, given back."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvstore_client.handshake import GrantedIndex
from kvstore_client.lookup_index import LookupIndex, map_index
from kvstore_proto.identity import BlockKeys
from kvstore_proto.lookup_index import ABSENT, BUCKET_BYTES, HEADER_BYTES, UNKNOWN
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients import lookup_index
from kvstored.clients.lookup_index import LookupIndexes
from kvstored.lifecycle import Cause
from tests.reference.blocks import Shelf, pack
from tests.reference.index_memory import image_of, key_of, reader_of, run_of, table_of

HOST, NVME = pb.TIER_CODE_HOST, pb.TIER_CODE_NVME
TABLE_BYTES = HEADER_BYTES + 256 * BUCKET_BYTES


@dataclass
class StandInTenant:
    digest: bytes


@dataclass
class StandInSession:
    """The part of a session that the tables need."""

    session_id: int
    tenant_id: int = 0
    exact: bool = True
    on_close: list[Callable[[], None]] = field(default_factory=list)

    @property
    def tenant(self) -> StandInTenant:
        return StandInTenant(bytes([self.tenant_id]) * 16)

    def close(self) -> None:
        for action in self.on_close:
            action()


class Tables:
    """Two tenants' blocks and their indexes; slices of work wait until `run` lets them go."""

    def __init__(self, total_bytes: int = 4 * TABLE_BYTES, slots: int = 1536) -> None:
        self.shelf = Shelf("host", "nvme", tenants=2)
        self.later: deque[Callable[[], None]] = deque()
        self.indexes = LookupIndexes(slots, total_bytes, self.shelf.residency, self.later.append)
        self.shelf.residency.observe(self.indexes)

    def run(self, slices: int | None = None) -> None:
        while self.later and slices != 0:
            self.later.popleft()()
            slices = None if slices is None else slices - 1

    def ask(self, session: StandInSession) -> LookupIndex | str:
        grant, descriptor = self.indexes.grant(session)  # type: ignore[arg-type]
        return map_index(GrantedIndex(grant.size_bytes, -1 if descriptor is None else descriptor, grant.reason))

    def index(self, session: StandInSession) -> LookupIndex:
        found = self.ask(session)
        assert isinstance(found, LookupIndex), found
        return found


def codes(index: LookupIndex, *numbers: int) -> list[int]:
    return index.codes(BlockKeys(pack(*numbers)))


def test_blocks_of_before_are_entered_in_slices_and_changes_meanwhile_are_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup_index, "ROWS_A_SLICE", 8)
    tables = Tables()
    for number in range(30):
        tables.shelf.store(number, tier=number % 2)
    index = tables.index(StandInSession(1))
    assert codes(index, *range(8)) == [HOST, NVME] * 4
    assert codes(index, 8, 29, 41) == [UNKNOWN] * 3, "not entered yet, so not called absent"
    tables.shelf.store(40)
    row = tables.shelf.residency.find_any(0, pack(29))
    tables.shelf.residency.remove(row, Cause.DROPPED, 2)
    assert codes(index, 40) == [HOST]
    tables.run(1)
    assert tables.later, "more slices to go"
    tables.run()
    assert codes(index, *range(29)) == [HOST, NVME] * 14 + [HOST]
    assert codes(index, 29, 40, 41) == [ABSENT, HOST, ABSENT]


@pytest.mark.parametrize("slice_of", ["KEYS_A_SLICE", "ROWS_A_SLICE"])
def test_no_slice_is_long_and_none_is_skipped(monkeypatch: pytest.MonkeyPatch, slice_of: str) -> None:
    tables = Tables()
    for number in range(50):
        tables.shelf.store(number)
    monkeypatch.setattr(lookup_index, slice_of, 7)
    index = tables.index(StandInSession(1))
    counts = []
    while tables.later:
        counts.append(codes(index, *range(50)).count(HOST))
        tables.run(1)
    assert counts[:7] == [7, 14, 21, 28, 35, 42, 49]
    assert codes(index, *range(51)) == [HOST] * 50 + [ABSENT]


def test_the_fastest_copy_counts_and_other_tenants_blocks_are_not_there() -> None:
    tables = Tables()
    residency = tables.shelf.residency
    ours, theirs = tables.index(StandInSession(1)), tables.index(StandInSession(2, tenant_id=1))
    tables.run()
    row = tables.shelf.store(1, tier=1)
    assert (codes(ours, 1), codes(theirs, 1)) == ([NVME], [ABSENT])
    residency.attach(row, 0, tables.shelf.slot(), 1, filling=True)
    assert codes(ours, 1) == [NVME], "not before it is whole"
    residency.publish(row, 0, 1)
    assert codes(ours, 1) == [HOST]
    residency.detach(row, 0)
    assert codes(ours, 1) == [NVME]
    residency.remove(row, Cause.DROPPED, 1)
    assert codes(ours, 1) == [ABSENT]
    assert ours.layout.tenant != theirs.layout.tenant


def test_memory_is_bounded_and_comes_back_with_the_last_session() -> None:
    tables = Tables(total_bytes=4 * TABLE_BYTES)
    for _ in range(4):
        tables.shelf.residency.tenant(f"more-{_}")
    sessions = [StandInSession(number, tenant_id=number) for number in range(5)]
    second = StandInSession(10)
    assert all(isinstance(tables.ask(session), LookupIndex) for session in (*sessions[:4], second))
    assert tables.indexes.used_bytes == 4 * TABLE_BYTES
    refused = tables.ask(sessions[4])
    assert isinstance(refused, str) and "memory that is set aside" in refused
    sessions[0].close()
    assert tables.indexes.used_bytes == 4 * TABLE_BYTES, "its tenant has another session"
    second.close()
    assert tables.indexes.used_bytes == 3 * TABLE_BYTES
    assert isinstance(tables.ask(sessions[4]), LookupIndex)
    for session in sessions[1:]:
        session.close()
    assert tables.indexes.used_bytes == 0
    tables.shelf.store(7)  # no client follows, nothing breaks


def test_a_table_that_ended_says_unknown_and_its_slices_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_index, "ROWS_A_SLICE", 8)
    tables = Tables()
    for number in range(20):
        tables.shelf.store(number)
    session = StandInSession(1)
    index = tables.index(session)
    session.close()
    tables.run()
    assert codes(index, *range(20)) == [UNKNOWN] * 20


def test_without_slots_or_memory_nothing_is_offered() -> None:
    for tables in (Tables(slots=0), Tables(total_bytes=4 * HEADER_BYTES)):
        assert not tables.indexes.offered
        assert isinstance(tables.ask(StandInSession(1)), str)


def test_a_machine_without_memory_or_descriptors_costs_the_index_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    tables = Tables()
    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", refuse)
        assert "Too many open files" in str(tables.ask(StandInSession(1)))
        assert tables.indexes.used_bytes == 0
    tables.index(StandInSession(1))
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        assert "Too many open files" in str(tables.ask(StandInSession(2)))
    assert isinstance(tables.ask(StandInSession(2)), LookupIndex)


def test_a_key_that_found_its_bucket_full_gets_the_next_free_slot() -> None:
    table = table_of()
    reader = reader_of(table)
    everything = run_of(*range(9))
    for number in range(9):
        table.put([key_of(number)], HOST)
    assert reader.codes(everything) == [HOST] * 6 + [UNKNOWN] * 3
    table.put([key_of(7)], NVME)
    table.remove([key_of(8)])
    assert (table.keys, reader.codes(run_of(8, 9))) == (6, [UNKNOWN] * 2), "one of two others may be meant"
    table.remove([key_of(0)])
    table.remove([key_of(1)])
    assert reader.codes(everything) == [ABSENT] * 2 + [HOST] * 5 + [NVME, ABSENT]
    table.remove([key_of(2)])
    assert (table.keys, reader.codes(everything)[2]) == (5, ABSENT)
    table.close()


def test_nothing_is_written_that_does_not_change() -> None:
    table = table_of()
    table.put([key_of(1)], HOST)
    before = image_of(table).tobytes()
    table.put([key_of(1)], HOST)
    table.remove([key_of(2)])
    assert image_of(table).tobytes() == before
    table.close()
    table.close()
