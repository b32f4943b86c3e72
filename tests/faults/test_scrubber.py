"""The scrubber finds damage before a reader does, raises no false alarm, and is never in anybody's way."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvstore_proto.v1 import admin_pb2 as pb
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.testing.transfers import block, finish, put
from kvstored.health.scrub import worker
from kvstored.health.scrub.slab_reader import SlabReader, SlotReading
from kvstored.health.scrub.worker import Pace, Position, position_of
from tests.reference.conversations import model, payloads_of, serves_whole, tokens_of
from tests.reference.damage import flip_on_disk, flip_record
from tests.reference.examples import each_nth
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon
from tests.reference.stored_blocks import store_numbers

MODEL = model()
EAGER = ("scrub.start_s=0", "scrub.interval_s=0.2", "scrub.rate=256MiB")
CAPACITY_BYTES = 3 << 20
PAYLOAD_BYTES = 10_000


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(*EAGER) as running:
        yield running


def store(daemon: RunningDaemon, conversation: int, blocks: int) -> None:
    with daemon.connect() as session:
        receipt = session.put(
            tokens_of(conversation, blocks), payloads=payloads_of(conversation, blocks, MODEL), wait="settled"
        )
        assert set(receipt.durability) == {"durable"}


def found_damage(daemon: RunningDaemon, slots: int = 1) -> bool:
    return eventually(lambda: daemon.status().counters["scrub_corrupt"] == slots)


def test_damage_is_found_before_anybody_reads(daemon: RunningDaemon) -> None:
    store(daemon, 1, 4)
    daemon.drop("host")
    assert flip_on_disk(daemon, depth=2) == 1
    assert found_damage(daemon)
    with daemon.connect() as session:
        found = session.lookup(tokens_of(1, 4))
        assert (found.blocks, found.reason) == (2, "corrupt")
    (slot,) = daemon.ask("Quarantine", pb.QuarantineRequest()).slots
    assert slot.reason == "the payload's checksum does not hold"
    assert daemon.log.count("is damaged in tier nvme") == 1
    assert daemon.status().counters["corrupt_blocks"] == 1


def test_what_dram_has_is_written_again(daemon: RunningDaemon) -> None:
    store(daemon, 1, 4)
    assert flip_on_disk(daemon, depth=2) == 1
    assert found_damage(daemon)
    assert eventually(lambda: daemon.tiers()["nvme"].blocks == 4)
    daemon.ask("Flush", pb.FlushRequest())
    daemon.kill9()
    daemon.restart()
    assert serves_whole(daemon, 1, 4)


@pytest.mark.parametrize("in_dram", each_nth([False, True], 2))
def test_a_damaged_record_is_written_again_from_its_slot(daemon: RunningDaemon, in_dram: bool) -> None:
    store(daemon, 1, 4)
    if not in_dram:
        daemon.drop("host")
    assert flip_record(daemon, depth=2) == 1
    assert found_damage(daemon)
    assert eventually(lambda: "written again from the slot" in daemon.log)
    daemon.ask("Flush", pb.FlushRequest())
    assert daemon.status().counters["corrupt_blocks"] == 0, "its bytes are whole"
    daemon.kill9()
    daemon.restart()
    assert serves_whole(daemon, 1, 4)


def test_it_is_shown_steps_back_and_ends_with_the_daemon(daemon: RunningDaemon) -> None:
    store(daemon, 1, 4)
    assert eventually(lambda: daemon.status().scrub.last_pass_slots >= 4)
    status = daemon.status()
    pid = status.scrub.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    assert f"PPid:\t{daemon.pid}\n" in Path(f"/proc/{pid}/status").read_text()
    assert status.counters["scrubbed_bytes"] == status.scrub.read_bytes > 4 * MODEL.payload_bytes()
    daemon.kill9()
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_a_worker_that_dies_is_started_again_but_not_for_ever(daemon: RunningDaemon) -> None:
    for life in range(1, 6):
        assert eventually(lambda: daemon.status().scrub.pid > 0)
        pid = daemon.status().scrub.pid
        os.kill(pid, 9)
        assert eventually(lambda pid=pid: daemon.status().scrub.pid != pid), life  # type: ignore[misc]
    assert eventually(lambda: daemon.status().scrub.state == "failed")
    assert any("off until a restart" in warning for warning in daemon.status().warnings)
    store(daemon, 1, 2)  # and stores go on


def test_it_can_be_turned_off() -> None:
    with running_daemon(*EAGER, "scrub.enabled=false") as daemon:
        store(daemon, 1, 2)
        assert daemon.status().scrub.state == "off"


# The parts


@pytest.mark.slow
def test_no_false_alarm_beside_a_tier_that_writes(tmp_path: Path) -> None:
    """Slots are freed, taken again and written all the while; whichever state the reader sees, it reports no damage."""
    stop = threading.Event()
    visits = 0
    with closing(NvmeTier.open(tmp_path, CAPACITY_BYTES, slab_bytes=256 << 10, io_threads=2)) as tier:

        def read() -> None:
            nonlocal visits
            while not stop.is_set():
                for slab in sorted((tmp_path / "slabs").glob("*.slab")):
                    for reading in SlabReader(slab, int(slab.stem), lambda nbytes: None).readings(0):
                        visits += 1
                        assert reading.suspect is None, reading

        failed: list[BaseException] = []

        def guarded() -> None:
            try:
                read()
            except BaseException as error:
                failed.append(error)

        reader = threading.Thread(target=guarded)
        reader.start()
        slots: dict[int, Any] = {}
        for number in range(1, 600):
            payload_bytes = PAYLOAD_BYTES if number % 100 < 80 else 3 * PAYLOAD_BYTES  # and slabs change their size
            slot = put(tier, *block(number, payload_bytes))
            while slot is None:
                tier.free(slots.pop(next(iter(slots))))
                slot = put(tier, *block(number, payload_bytes))
            slots[number] = slot
            if number % 8 == 0:
                assert finish(tier.sync).ok
        stop.set()
        reader.join()
    assert not failed, failed
    assert visits > 100


@pytest.mark.parametrize("offset", [0, 10, 100, 4096, 4096 + 9_000])
def test_each_kind_of_damage_is_suspect(tmp_path: Path, offset: int) -> None:
    with closing(NvmeTier.open(tmp_path, CAPACITY_BYTES, slab_bytes=256 << 10, io_threads=1)) as tier:
        slots = [put(tier, *block(number, PAYLOAD_BYTES)) for number in (1, 2, 3)]
        assert finish(tier.sync).ok
    assert slots[1] is not None
    (slab,) = (tmp_path / "slabs").glob("*.slab")
    with open(slab, "r+b") as file:
        file.seek(slots[1].offset + offset)
        byte = file.read(1)[0]
        file.seek(slots[1].offset + offset)
        file.write(bytes([byte ^ 1]))
    visits = list(SlabReader(slab, 1, lambda nbytes: None).readings(0))
    suspects = [reading.suspect for reading in visits if reading.suspect is not None]
    assert len(visits) == 3 and len(suspects) == 1
    assert (suspects[0].slot, suspects[0].offset, suspects[0].key) == (1, slots[1].offset, f"{2:032x}")


def test_a_pass_goes_on_where_the_last_process_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(NvmeTier.open(tmp_path / "d", CAPACITY_BYTES, slab_bytes=256 << 10, io_threads=1)) as tier:
        store_numbers(tier, range(1, 61), PAYLOAD_BYTES)
        assert finish(tier.sync).ok
    settings = worker.ScrubSettings(str(tmp_path / "d"), "", 1 << 30, 1000.0)
    seen: list[tuple[int, int]] = []
    said: list[str] = []
    places = [""]

    class Interrupted(worker.ScrubWorker):
        def _note(self, reading: SlotReading) -> None:
            super()._note(reading)
            seen.append((reading.slab, reading.next_slot))
            self._save()
            if len(seen) % 25 == 0:
                raise worker.InputClosed

    def wait_for_the_next_pass(seconds: float) -> None:
        if seconds > 1:
            raise worker.InputClosed

    def say(what: str, fields: dict[str, object]) -> None:
        said.append(what)
        if what == "position":
            places.append(json.dumps(fields))

    monkeypatch.setattr(worker, "say", say)
    monkeypatch.setattr(worker, "pause", wait_for_the_next_pass)
    for _ in range(3):
        with pytest.raises(worker.InputClosed):
            Interrupted(replace(settings, position=places[-1])).run()
    assert len(seen) == len(set(seen)) == 60, "every slot once, over three processes"
    assert said.count("pass") == 1
    after = position_of(places[-1].encode())
    assert after.pass_began_s == 0 and after.last_pass_s > 0 and after.pass_slots == 60


def test_the_pace_is_kept_without_bursts() -> None:
    pace = Pace(1000)
    assert pace.take(500, 10.0) == 0
    assert pace.take(500, 10.0) == 0.5
    assert pace.take(1, 11.0) == 0
    assert pace.take(1000, 100.0) == 0, "a pause saves nothing up"
    assert pace.take(1000, 100.0) == 1.0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"slab": -1}', json.dumps({"slab": "x"})])
def test_a_lost_position_costs_a_pass_from_the_front(text: str) -> None:
    assert position_of(text.encode()) == Position()
    position = Position(slab=3, slot=7, pass_began_s=5.0, pass_bytes=9)
    assert position_of(json.dumps(asdict(position)).encode()) == position


def test_when_a_pass_is_due() -> None:
    assert Position().due_in_s(100, now_s=1_000_000) == 0
    assert Position(last_pass_began_s=950).due_in_s(100, now_s=1000) == 50
    assert Position(last_pass_began_s=950, pass_began_s=990).due_in_s(100, now_s=1000) == 0, "one is under way"
    assert Position(last_pass_began_s=2000).due_in_s(100, now_s=1000) == 0, "the clock was set back"
