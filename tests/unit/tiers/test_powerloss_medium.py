"""The model of a medium that loses power: what a sync vouches for, what may be torn, what a name is worth."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvstore_tiers.testing.powerloss.crashes import Kept, crash_states, crash_ticks, the_state
from kvstore_tiers.testing.powerloss.log import Kind, Operation, UnseenChange, pack, pack_mark, read_log, write_log
from kvstore_tiers.testing.powerloss.medium import Change, Medium, Tree

FOREVER = 10**9
ROOT = Operation(Kind.MKDIR, 0, 1, 1, path="/r")


def history(*calls: tuple[Kind, dict[str, object]]) -> list[Operation]:
    """One call after the other below /r, whose inode is 1."""
    return [ROOT, *(Operation(kind, 10 * at, 10 * at + 5, **about) for at, (kind, about) in enumerate(calls, 1))]  # type: ignore[arg-type]


def create(path: str = "/r/f", inode: int = 2) -> tuple[Kind, dict[str, object]]:
    return Kind.CREATE, {"path": path, "inode": inode}


def write(data: bytes, offset: int = 0, inode: int = 2, through: bool = False) -> tuple[Kind, dict[str, object]]:
    return Kind.WRITE, {"inode": inode, "offset": offset, "data": data, "through": through}


def sync(inode: int = 2) -> tuple[Kind, dict[str, object]]:
    return Kind.SYNC, {"inode": inode}


def after(operations: Iterable[Operation], share: float, tick: int = FOREVER, grain: int = 0) -> Tree:
    """Return what is there when this share of what is not synced survived."""
    medium = Medium(operations)
    medium.advance(tick)
    return medium.tree(Kept("", lambda change: share, lambda change: grain, "seed"))


ALL, NOTHING = 1.0, 0.0
NAMED = (create(), sync(1))


def test_what_is_not_synced_may_be_there_and_may_be_gone() -> None:
    calls = history(*NAMED, write(b"x" * 512))
    assert after(calls, ALL) == {"f": b"x" * 512}
    assert after(calls, NOTHING) == {"f": b""}


def test_a_synced_write_is_there() -> None:
    assert after(history(*NAMED, write(b"x" * 700), sync()), NOTHING) == {"f": b"x" * 700}


def test_a_file_without_a_synced_name_is_lost_with_its_synced_bytes() -> None:
    assert after(history(create(), write(b"x"), sync()), NOTHING) == {}
    assert after(history(create(), write(b"x"), sync(), sync(1)), NOTHING) == {"f": b"x"}


def test_a_sync_vouches_only_for_what_returned_before_it_began() -> None:
    calls = [
        *history(*NAMED),
        Operation(Kind.WRITE, 30, 36, 2, 0, data=b"early" * 200),
        Operation(Kind.WRITE, 31, 42, 2, 4096, data=b"late" * 128),  # still running when the sync begins
        Operation(Kind.SYNC, 40, 50, 2),
    ]
    found = after(calls, NOTHING)["f"]
    assert found is not None and found.rstrip(b"\0") == b"early" * 200
    assert after(calls, NOTHING, tick=50) == {"f": b""}, "and from its end on"
    assert after(calls, NOTHING, tick=51) == {"f": b"early" * 200}


def test_nothing_is_there_before_it_was_begun() -> None:
    calls = history(*NAMED, write(b"x"))
    assert after(calls, ALL, tick=30) == {"f": b""}
    assert after(calls, ALL, tick=31) == {"f": b"x"}


def test_a_write_is_torn_between_sectors_and_never_within_one() -> None:
    old, new = b"o" * 8192, b"n" * 8192
    calls = history(*NAMED, write(old), sync(), write(new))
    seen = set()
    for seed in range(30):
        medium = Medium(calls)
        medium.advance(FOREVER)
        found = medium.tree(Kept("", lambda change: 0.5, lambda change: 512, str(seed)))["f"]
        assert found is not None and len(found) == 8192
        sectors = [found[at : at + 512] for at in range(0, 8192, 512)]
        assert all(sector in (old[:512], new[:512]) for sector in sectors)
        seen.add(bytes(sector[0] for sector in sectors))
    assert len(seen) > 20, "many ways of tearing"


def test_of_two_writes_to_one_sector_the_second_never_survives_without_the_first() -> None:
    calls = history(*NAMED, write(bytes(512)), sync(), write(b"a" * 8, 0), write(b"b" * 8, 8))
    found = set()
    for number in range(20):
        chosen = random.Random(number)
        kept = Kept("", lambda change, chosen=chosen: float(chosen.random() < 0.5), lambda change: 0, str(number))  # type: ignore[misc]
        medium = Medium(calls)
        medium.advance(FOREVER)
        found.add((medium.tree(kept)["f"] or b"")[:16])
    assert found <= {bytes(16), b"a" * 8 + bytes(8), b"a" * 8 + b"b" * 8}
    assert len(found) == 3


def test_a_write_through_is_settled_alone() -> None:
    calls = history(*NAMED, write(b"x" * 4096), write(b"y" * 512, 8192, through=True))
    found = after(calls, NOTHING)["f"]
    assert found == bytes(8192) + b"y" * 512


def test_a_rename_is_atomic_and_needs_its_directory_synced() -> None:
    calls = history(
        *NAMED, write(b"old"), sync(), create("/r/f.new", 3), write(b"new", inode=3), sync(3),
        (Kind.RENAME, {"inode": 3, "path": "/r/f.new", "data": b"/r/f"}),
    )  # fmt: skip
    assert after(calls, NOTHING) == {"f": b"old"}
    assert after(calls, ALL) == {"f": b"new"}
    assert after([*calls, Operation(Kind.SYNC, 200, 201, 1)], NOTHING) == {"f": b"new"}


def test_a_truncation_cuts_or_does_not() -> None:
    calls = history(*NAMED, write(b"x" * 1024), sync(), (Kind.TRUNCATE, {"inode": 2, "offset": 100}))
    assert after(calls, NOTHING) == {"f": b"x" * 1024}
    assert after(calls, ALL) == {"f": b"x" * 100}
    grown = [*calls, Operation(Kind.ALLOCATE, 100, 101, 2, 300)]
    assert after(grown, ALL) == {"f": b"x" * 100 + bytes(200)}, "what was cut off does not come back"


def test_a_reused_inode_is_another_file() -> None:
    calls = history(
        *NAMED, write(b"first"), sync(), (Kind.UNLINK, {"inode": 2, "path": "/r/f"}), create("/r/g", 2), sync(1),
        write(b"second"),
    )  # fmt: skip
    assert after(calls, NOTHING) == {"g": b""}
    assert after(calls, ALL) == {"g": b"second"}


def test_a_file_older_than_the_recording_is_refused() -> None:
    with pytest.raises(ValueError, match="before the recording"):
        Medium(history(write(b"x", inode=77)))


def test_a_log_comes_back_and_what_a_killed_process_wrote_half_is_skipped(tmp_path: Path) -> None:
    calls = history(*NAMED, write(b"x" * 100, 7, through=True), (Kind.MARK, {"data": pack_mark({"put": [1]})}))
    write_log(tmp_path / "log", calls)
    assert read_log(tmp_path / "log") == calls
    whole = [pack(call) for call in calls]
    (tmp_path / "log").write_bytes(b"".join([*whole[:3], whole[3][:60], *whole[4:], whole[3][:30]]))
    assert read_log(tmp_path / "log") == [*calls[:3], *calls[4:]]


def test_a_log_with_a_gap_is_refused(tmp_path: Path) -> None:
    write_log(tmp_path / "log", history((Kind.UNSEEN, {"path": "sendfile"})))
    with pytest.raises(UnseenChange, match="sendfile"):
        read_log(tmp_path / "log")


def two_files() -> list[Operation]:
    return history(
        *NAMED, create("/r/g", 3), sync(1), write(b"x" * 9000), write(b"y" * 9000, inode=3), sync(),
        (Kind.MARK, {"data": pack_mark({"durable": [1]})}), write(b"z" * 700, 4096, inode=3), sync(3),
    )  # fmt: skip


def test_states_are_distinct_the_same_every_time_and_can_be_made_again() -> None:
    calls = two_files()
    states = list(crash_states(calls, crash_ticks(calls), seed=5, rounds=3))
    again = list(crash_states(calls, crash_ticks(calls), seed=5, rounds=3))
    assert states == again
    assert len({(state.digest, state.tick) for state in states}) == len(states) > 15
    assert any(state.how.startswith("random") for state in states)
    for state in states[::7]:
        assert the_state(calls, state.tick, state.how) == state


def test_files_are_lost_alone_and_together() -> None:
    """Reordering across files: each of two unsynced writes is seen with and without the other."""
    calls = two_files()
    before_the_sync = next(one.start for one in calls if one.kind is Kind.SYNC and one.start > 60)
    found = {
        (bool((state.tree["f"] or b"").strip(b"\0")), bool((state.tree["g"] or b"").strip(b"\0")))
        for state in crash_states(calls, [before_the_sync], seed=1, rounds=1)
    }
    assert found == {(False, False), (False, True), (True, False), (True, True)}


def test_the_stream_ends_when_nothing_new_is_found() -> None:
    calls = history(*NAMED, write(b"x"))
    assert 1 < len(list(crash_states(calls, crash_ticks(calls), seed=1, strides=2))) < 20


def test_a_change_is_compared_by_identity() -> None:
    same = (2, Kind.WRITE, 1, 2, 0, b"x")
    assert Change(*same) != Change(*same), "two equal writes are two writes"
