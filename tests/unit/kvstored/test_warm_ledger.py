"""The ledger of warm restart: the next process reads what the last one wrote; foreign files are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_tiers.arena import ArenaRecord
from kvstore_tiers.base import Slot
from kvstored.lifetime.warm.ledger import LEASE_ROWS, SLOTS_A_ROW, ForeignLedger, Ledger

OWNER = "ab" * 16
TOKEN, LATER = b"t" * 16, b"u" * 16


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(tmp_path)
    yield made
    made.close()


def reread(ledger: Ledger, tmp_path: Path) -> Ledger:
    """Return what a later process finds."""
    return Ledger(tmp_path, os.dup(ledger.fd))


def slots(count: int, container: int = 3) -> list[Slot]:
    return [Slot(container, index * 8192, 8192, 7) for index in range(count)]


def test_arenas_are_read_back(ledger: Ledger, tmp_path: Path) -> None:
    record = ArenaRecord(5, 1 << 20, OWNER, 0, 0, 0)
    assert ledger.add_arena(record) and ledger.add_arena(ArenaRecord(2, 1 << 21, OWNER, 8192, 3, 9))
    ledger.change_arena(ArenaRecord(5, 1 << 20, OWNER, 4096 * 5, 2, 4))
    later = reread(ledger, tmp_path)
    assert later.arenas() == [ArenaRecord(2, 1 << 21, OWNER, 8192, 3, 9), ArenaRecord(5, 1 << 20, OWNER, 20480, 2, 4)]
    later.forget_arena(2)
    assert [found.number for found in reread(ledger, tmp_path).arenas()] == [5]
    assert later.next_arena == 6, "a number is not used again, even if its arena is forgotten"
    assert later.epoch == ledger.epoch
    later.close()


def test_unused_rows_take_no_memory_in_a_later_process(ledger: Ledger, tmp_path: Path) -> None:
    held = os.fstat(ledger.fd).st_blocks
    assert reread(ledger, tmp_path).arenas() == [] and os.fstat(ledger.fd).st_blocks == held


def test_an_arena_without_an_owner_is_not_kept(ledger: Ledger) -> None:
    assert not ledger.add_arena(ArenaRecord(1, 4096, "", 0, 0, 0))
    ledger.change_arena(ArenaRecord(1, 4096, "", 4096, 1, 1))
    assert ledger.arenas() == [] and ledger.next_arena == 2


def test_leases_are_their_sessions(ledger: Ledger, tmp_path: Path) -> None:
    ledger.open_session(4, 123, 456, TOKEN)
    ledger.record_lease(8, 4, slots(SLOTS_A_ROW * 2 + 1))
    ledger.record_lease(9, 4, slots(1, container=1 << 20))
    ledger.record_lease(10, 77, slots(2))  # of a call, which ends with its process
    ledger.record_lease(11, 4, slots(2))
    ledger.end_lease(11)
    later = reread(ledger, tmp_path)
    (session,) = later.sessions()
    assert (session.session_id, session.pid, session.start_ticks, session.tokens[0]) == (4, 123, 456, TOKEN)
    assert {lease.lease_id: sorted(lease.places) for lease in session.leases} == {
        8: [(slot.container, slot.offset) for slot in slots(SLOTS_A_ROW * 2 + 1)],
        9: [(1 << 20, 0)],
    }
    assert later.last_lease_id == 11 and later.last_session_id == 4
    later.close_session(4)
    assert reread(ledger, tmp_path).sessions() == []


def test_a_client_that_came_back_is_known_by_both_tokens(ledger: Ledger, tmp_path: Path) -> None:
    """Until it has heard of the new one it names the old one."""
    ledger.open_session(4, 123, 456, TOKEN)
    later = reread(ledger, tmp_path)
    later.open_session(4, 124, 457, LATER, TOKEN)
    (session,) = reread(ledger, tmp_path).sessions()
    assert (session.pid, session.start_ticks, session.tokens) == (124, 457, (LATER, TOKEN))


def test_a_lease_that_finds_no_row_is_left_out_whole(ledger: Ledger, tmp_path: Path) -> None:
    ledger.open_session(1, 2, 3, TOKEN)
    for number in range(1, LEASE_ROWS + 1):
        ledger.record_lease(number, 1, slots(1))
    ledger.end_lease(1)
    ledger.record_lease(90_000, 1, slots(SLOTS_A_ROW + 1))  # needs two rows, one is free
    (session,) = reread(ledger, tmp_path).sessions()
    assert len(session.leases) == LEASE_ROWS - 1 and 90_000 not in {lease.lease_id for lease in session.leases}
    ledger.end_lease(90_000)
    ledger.record_lease(90_001, 1, slots(1))
    (session,) = reread(ledger, tmp_path).sessions()
    assert len(session.leases) == LEASE_ROWS


def test_what_is_not_ours_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    other_place = tmp_path / "other"
    other_place.mkdir()
    with pytest.raises(ForeignLedger, match="another state directory"):
        Ledger(other_place, os.dup(ledger.fd))
    for offset, content, why in ((0, b"x", "no ledger"), (8, b"\x09", "another format"), (40, b"\0" * 8, "reboot")):
        fresh = Ledger(tmp_path)
        os.pwrite(fresh.fd, content, offset)
        with pytest.raises(ForeignLedger, match=why):
            Ledger(tmp_path, os.dup(fresh.fd))
    foreign = os.memfd_create("kvstore-ledger")
    with pytest.raises(ForeignLedger):
        Ledger(tmp_path, foreign)
    with open(os.devnull) as file, pytest.raises(ForeignLedger):
        Ledger(tmp_path, os.dup(file.fileno()))
    os.fchmod(ledger.fd, 0o666)
    with pytest.raises(ForeignLedger, match="mode"):
        Ledger(tmp_path, os.dup(ledger.fd))


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("lease"), st.integers(1, 4), st.integers(1, 70)),
        st.tuples(st.just("end"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("open"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("close"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("crash"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_it_says_what_a_plain_model_says(tmp_path_factory: pytest.TempPathFactory, operations: list[tuple]) -> None:  # type: ignore[type-arg]
    place = tmp_path_factory.getbasetemp()
    ledger, opened, leases = Ledger(place), set[int](), dict[int, tuple[int, int]]()
    last = 0
    for what, number, count in operations:
        if what == "lease" and number in opened:
            last += 1
            ledger.record_lease(last, number, slots(count))
            leases[last] = (number, count)
        elif what == "end":
            ledger.end_lease(number)
            leases.pop(number, None)
        elif what == "open" and number not in opened:
            ledger.open_session(number, number, number, TOKEN)
            opened.add(number)
        elif what == "close" and number in opened:
            for lease_id in [key for key, (session, _) in leases.items() if session == number]:
                ledger.end_lease(lease_id)
                del leases[lease_id]
            ledger.close_session(number)
            opened.discard(number)
        elif what == "crash":
            before, ledger = ledger, reread(ledger, place)
            before.close()
        known = {session.session_id: session for session in ledger.sessions()} if what == "crash" else None
        if known is not None:
            assert set(known) == opened and ledger.last_lease_id == last
            found = {
                lease.lease_id: (session.session_id, len(lease.places))
                for session in known.values()
                for lease in session.leases
            }
            assert found == leases
    ledger.close()
