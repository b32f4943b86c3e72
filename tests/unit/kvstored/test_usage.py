"""What blocks were used for, over a restart: the same copies get their counts and times back, and no others do."""

from __future__ import annotations

import asyncio
import random
import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest
from kvstored.lifetime.usage_file import FILE, UsageFile

from kvstored.clock import NS_PER_S, ManualClock
from kvstored.policy_names import CHAIN_HAZARD
from kvstored.store.blocks.usage import DTYPE, STEP_ROWS, apply, collect
from kvstored.store.policies import create
from kvstored.store.prefetch.credit import PrefetchCredit
from kvstored.store.prefetch.guarded_predictor import GuardedPredictor, PrefetchState
from kvstored.store.prefetch.on_hint import OnHint
from kvstored.store.prefetch.recent import RecentRequests
from kvstored.telemetry import Counters
from kvstored.unsaved import Unsaved
from tests.reference.blocks import Shelf, key
from tests.reference.tiers import HOST, NVME

WALL_NS = 10**18
BLOCKS = 40


def used_shelf() -> Shelf:
    """Blocks on NVMe, of which block n was used n times, the last time n seconds after the start."""
    shelf = Shelf("host", "nvme")
    rows = [shelf.store(number, tier=NVME) for number in range(1, BLOCKS + 1)]
    for number, row in enumerate(rows, 1):
        for _ in range(number):
            shelf.residency.touch_run([row], number * NS_PER_S)
    return shelf


def forget(shelf: Shelf) -> None:
    rows = shelf.residency.rows
    for row in range(rows.capacity):
        rows.accesses[row], rows.last_access_ns[row] = 1, 5000 * NS_PER_S


def usage_of(shelf: Shelf, now_ns: int) -> np.ndarray:
    return np.concatenate(list(collect(shelf.residency, NVME, WALL_NS - now_ns)))


def test_counts_and_the_order_of_use_come_back() -> None:
    shelf = used_shelf()
    before = [shelf.residency.accesses(row) for row in range(BLOCKS)]
    usage = usage_of(shelf, 100 * NS_PER_S)
    forget(shelf)
    later_ns = WALL_NS + 50 * NS_PER_S
    assert apply(shelf.residency, NVME, usage, 5000 * NS_PER_S, later_ns) == BLOCKS
    assert [shelf.residency.accesses(row) for row in range(BLOCKS)] == before
    for row in range(BLOCKS):
        age_s = 150 - (row + 1)
        assert shelf.residency.last_access_ns(row) == (5000 - age_s) * NS_PER_S


def test_ages_that_are_older_than_the_clock_keep_their_order() -> None:
    """After the machine started anew the monotonic clock is younger than the blocks."""
    shelf = used_shelf()
    usage = usage_of(shelf, 100 * NS_PER_S)
    forget(shelf)
    assert apply(shelf.residency, NVME, usage, 10 * NS_PER_S, WALL_NS + 3600 * NS_PER_S) == BLOCKS
    times = [shelf.residency.last_access_ns(row) for row in range(BLOCKS)]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= 10 * NS_PER_S
    assert len(set(times)) == BLOCKS


def test_another_block_in_the_same_place_gets_nothing() -> None:
    shelf = used_shelf()
    usage = usage_of(shelf, 100 * NS_PER_S)
    forget(shelf)
    usage["generation"][:10] += 1
    assert apply(shelf.residency, NVME, usage, 5000 * NS_PER_S, WALL_NS) == BLOCKS - 10
    assert apply(shelf.residency, HOST, usage, 5000 * NS_PER_S, WALL_NS) == 0
    assert apply(shelf.residency, NVME, np.empty(0, DTYPE), 5000 * NS_PER_S, WALL_NS) == 0


def test_the_file_holds_what_was_collected(tmp_path: Path) -> None:
    shelf, clock, counters = used_shelf(), ManualClock(100 * NS_PER_S), Counters()
    file = UsageFile(tmp_path, shelf.residency, clock)
    file.follow((), counters)
    counters.add("acquires")
    asyncio.run(file.save())
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    before = [shelf.residency.accesses(row) for row in range(BLOCKS)]
    forget(shelf)
    assert UsageFile(tmp_path, shelf.residency, clock).restore(()) == BLOCKS
    assert [shelf.residency.accesses(row) for row in range(BLOCKS)] == before
    (tmp_path / FILE).unlink()
    asyncio.run(file.save())
    assert not (tmp_path / FILE).exists(), "there was no request since"
    shelf.residency.forget(0, [key(1000)])
    asyncio.run(file.save())
    assert (tmp_path / FILE).exists(), "what is to be forgotten may be in the file"


def test_a_disk_that_fills_up_while_it_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shelf, unsaved = used_shelf(), Unsaved()
    (tmp_path / f"{FILE}.new").symlink_to("/dev/full")
    file = UsageFile(tmp_path, shelf.residency, ManualClock(100 * NS_PER_S), unsaved)
    asyncio.run(file.save())
    assert (
        unsaved.sentences()
        == caplog.messages
        == [f"{tmp_path / FILE} cannot be written (No space left on device): a restart forgets how blocks were used"]
    )
    asyncio.run(file.save())
    assert unsaved.sentences() == [] and (tmp_path / FILE).exists()


@pytest.mark.parametrize("spoil", [lambda raw: raw[: len(raw) // 2], lambda raw: b"", lambda raw: b"x" * 1000])
def test_a_damaged_file_costs_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil) -> None:  # type: ignore[no-untyped-def]
    shelf, clock = used_shelf(), ManualClock(100 * NS_PER_S)
    asyncio.run(UsageFile(tmp_path, shelf.residency, clock).save())
    path = tmp_path / FILE
    path.write_bytes(spoil(path.read_bytes()))
    assert UsageFile(tmp_path, shelf.residency, clock).restore(()) == 0
    assert len(caplog.records) == 1 and "no record of their use" in caplog.text


def start(tmp_path: Path, shelf: Shelf, clock: ManualClock) -> UsageFile:
    """With a policy and a predictor that learn."""
    file = UsageFile(tmp_path, shelf.residency, clock)
    file.restore(())
    prefetch = PrefetchState(GuardedPredictor(OnHint()), RecentRequests(), PrefetchCredit(0.2, 0.5, 1, Counters()))
    file.follow([create(CHAIN_HAZARD, shelf.residency, HOST)], Counters(), prefetch)
    return file


def save_learned(tmp_path: Path, shelf: Shelf, clock: ManualClock) -> None:
    asyncio.run(start(tmp_path, shelf, clock).save())


def places_of_headers(path: Path) -> list[int]:
    """Bytes of the file that are no payload: no checksum protects them."""
    with zipfile.ZipFile(path) as archive:
        begins = [member.header_offset for member in archive.infolist()]
        return [*(begin + at for begin in begins for at in range(128)), *range(archive.start_dir, path.stat().st_size)]


def test_one_flipped_bit_keeps_no_daemon_from_starting(tmp_path: Path) -> None:
    shelf, clock, chance = used_shelf(), ManualClock(100 * NS_PER_S), random.Random(1)
    save_learned(tmp_path, shelf, clock)
    path = tmp_path / FILE
    content, places = path.read_bytes(), places_of_headers(path)
    method, flags, shape = 10, 8, content.index(b"'shape'")  # of the directory's first entry: not stored, encrypted
    directory = content.index(b"PK\x01\x02")
    chosen = [(directory + method, 4), (directory + flags, 0), (shape, 3)]
    chosen += [(chance.choice(places), chance.randrange(8)) for _ in range(40)]
    for place, bit in chosen:
        spoilt = bytearray(content)
        spoilt[place] ^= 1 << bit
        path.write_bytes(spoilt)
        start(tmp_path, used_shelf(), clock)


def test_a_table_that_is_none_of_ours_costs_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shelf, clock = used_shelf(), ManualClock(100 * NS_PER_S)
    save_learned(tmp_path, shelf, clock)
    with np.load(tmp_path / FILE) as file:
        tables = {name: file[name] for name in file.files}
    tables[":prefetch/on-hint/credit"] = np.zeros(1, [("tenant", "i8", (2,))])
    np.savez(tmp_path / FILE, **tables)
    start(tmp_path, used_shelf(), clock)
    assert len(caplog.records) == 1 and "on-hint" in caplog.text


def test_without_a_file_there_is_nothing_to_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert UsageFile(tmp_path, used_shelf().residency, ManualClock()).restore(()) == 0
    assert not caplog.records


def test_it_is_collected_in_steps() -> None:
    shelf = Shelf("host", "nvme")
    shelf.store(1, tier=NVME)
    parts = list(collect(shelf.residency, NVME, 0))
    assert len(parts) == -(-len(shelf.residency.copies[NVME].state) // STEP_ROWS) and sum(map(len, parts)) == 1
