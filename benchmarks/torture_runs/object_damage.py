"""Objects under kill -9 and damage: puts, replacements and removals that a kill cuts short, and flipped bytes on NVMe.

Owns rounds on one directory: a client changes objects until the daemon is killed; slots on NVMe are damaged; the next
daemon must list each version whose put was answered and not removed since, and none that never was whole. What is read
must be what was put under that version, or a refusal that a damaged part explains. Parts are small, so that a round
damages many. DRAM is not kept over the kill: what is read comes from the medium.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstore_client.objects.sources import BytesSource
from kvstore_client.objects.store import ObjectStore, open_objects
from kvstore_proto.arena import ALIGNMENT_BYTES, HEADER_BYTES, MAGIC, read_header
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.manifest import PART_CLASSES
from torture_runs.figures import Assignment, Clock, Figures
from torture_runs.mortal_daemon import DaemonFailed, MortalDaemon

NVME_BYTES = 48 << 20
SETTINGS = (
    "host.capacity=48MiB", "host.staging=4MiB", "host.arena=2MiB", "host.warm_restart=off", "host.prefault=false",
    f"nvme.capacity={NVME_BYTES >> 20}MiB", "nvme.slab=2MiB", "nvme.io_threads=2", "nvme.quarantine_slots=0",
)  # fmt: skip
PART = PART_CLASSES[0]
NAMES = 8
MOST_PARTS = 60
DAMAGES = 80  # in a round
PATIENCE_S = 30.0
KILL_WITHIN_S = 0.6
Version = tuple[str, int]


@dataclass
class Record:
    """The client's record: the seed of each version that is there, and what the change under way may have done."""

    there: dict[Version, int] = field(default_factory=dict)
    coming: tuple[str, int] | None = None  # a name and a seed, of a put without an answer
    going: set[Version] = field(default_factory=set)  # of a removal without an answer


def content(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, int(rng.integers(1, MOST_PARTS * PART)), np.uint8).tobytes()


def torture(assignment: Assignment, figures: Figures) -> None:
    """Figures: `kills`, `corruptions`, `durable_lost`, `served_wrong`, `over_capacity_bytes`, `restart_failures`."""
    clock, rng, record, number = Clock(assignment), np.random.default_rng(assignment.seed), Record(), 0
    with MortalDaemon(assignment.directory / "objects", *SETTINGS) as daemon:
        daemon.start()
        daemon.is_forked = True  # from now on: quicker
        while number == 0 or clock.goes_on(figures.counts["kills"]):
            number += 1
            _changes_until_killed(daemon, record, rng, number)
            figures.add("kills")
            figures.at_least("over_capacity_bytes", max(daemon.disk_bytes() - NVME_BYTES, 0))
            damaged = _damage(daemon.nvme_dir, rng, figures) if number % 2 else set[bytes]()
            try:
                daemon.start()
            except DaemonFailed as error:
                figures.fail("restart_failures", str(error))
                daemon.start()
            _judge(daemon, record, damaged, figures)
            figures.heartbeat(now=True)


def _changes_until_killed(daemon: MortalDaemon, record: Record, rng: np.random.Generator, number: int) -> None:
    """Put, replace and remove objects, one after the other, until a timer kills the daemon."""
    timer = threading.Timer(float(rng.uniform(0.01, KILL_WITHIN_S)), daemon.kill9)
    with open_objects(daemon.socket_dir, staging_bytes=2 << 20, deadline_s=5) as store:
        timer.start()
        try:
            for step in range(1000):
                _change(store, record, rng, number * 1000 + step)
        except KVStoreError:  # cut short
            pass
        finally:
            timer.join()


def _change(store: ObjectStore, record: Record, rng: np.random.Generator, seed: int) -> None:
    name = f"object {int(rng.integers(NAMES))}"
    versions = {version for version in record.there if version[0] == name}
    if versions and rng.random() < 0.4:
        record.going = versions
        store.remove(name)
        for version in versions:
            del record.there[version]
        record.going = set()
        return
    record.coming = name, seed
    made = store.put(name, BytesSource(content(seed)), part_bytes=PART)
    if made.filled.durable_parts == len(made.filled.parts):
        record.there[name, made.version.version] = seed
        record.coming = None


def _damage(nvme: Path, rng: np.random.Generator, figures: Figures) -> set[bytes]:
    """Flip a byte in each of some slots, in headers and payloads alike. Return the keys of their blocks."""
    slots = []
    for slab in sorted(nvme.rglob("*.slab")):
        raw = slab.read_bytes()
        for offset in range(0, len(raw) - HEADER_BYTES, ALIGNMENT_BYTES):
            if raw[offset : offset + 4] == MAGIC and not isinstance(
                header := read_header(raw[offset : offset + HEADER_BYTES]), str
            ):
                slots.append((slab, offset, header.key, header.payload_bytes))
    damaged = set()
    for at in rng.permutation(len(slots))[:DAMAGES].tolist():
        slab, offset, key, payload_bytes = slots[at]
        with open(slab, "r+b", buffering=0) as file:
            place = offset + int(rng.integers(HEADER_BYTES + payload_bytes))
            byte = os.pread(file.fileno(), 1, place)[0]
            os.pwrite(file.fileno(), bytes([byte ^ int(rng.integers(1, 256))]), place)
        damaged.add(key)
        figures.add("corruptions")
    return damaged


def _judge(daemon: MortalDaemon, record: Record, damaged: set[bytes], figures: Figures) -> None:
    """Compare every version that is listed with what was put, and put again what damage took."""
    with open_objects(daemon.socket_dir, staging_bytes=2 << 20, deadline_s=PATIENCE_S) as store:
        listed = {(each.name, each.version): each for each in store.listed()}
        for version in [version for version in record.there if version not in listed]:
            if version not in record.going:
                figures.fail("durable_lost", f"{version} was put and is not listed")
            del record.there[version]
        for version, entry in listed.items():
            seed = record.there.get(version)
            if seed is None and record.coming is not None and record.coming[0] == version[0]:
                seed = record.there[version] = record.coming[1]  # whole, and only its answer is missing
            if seed is None:
                figures.fail("resurrected", f"{version} is listed and was never put, or was removed")
                continue
            figures.add("kill_checked_durable")
            try:
                if store.map(entry).content.tobytes() != content(seed):
                    figures.fail("served_wrong", f"{version} has other bytes than were put")
            except KVStoreError as error:
                if error.kind is not ErrorKind.UNAVAILABLE or not (damaged or version in record.going):
                    figures.fail("durable_lost", f"{version}: {error.message}")
                figures.add_kind("reads_refused", error.kind.value)
        for version in sorted(record.there):
            if damaged:  # older versions of a name cannot be put again under their number
                _repair(store, record, version, figures)
        record.coming, record.going = None, set()


def _repair(store: ObjectStore, record: Record, version: Version, figures: Figures) -> None:
    """Put what was damaged again, once it is found: until a damaged part is read, it is thought to be there."""
    name, number = version
    if not (before := _wrong(store, f"{name}@{number}")):
        return
    if any(other[0] == name and other[1] > number for other in record.there):
        store.remove(f"{name}@{number}")
        del record.there[version]
        return
    for _ in range(2):  # with its manifest back, the damage of its parts is found
        again = store.put(name, BytesSource(content(record.there[version])), part_bytes=PART)
        after = _wrong(store, name) if again.version.version == number else f"{again.version.version} was made"
        if not after:
            return
    figures.fail("durable_lost", f"{version} was put again, and is not whole: {before}, then {after}")


def _wrong(store: ObjectStore, name: str) -> str:
    try:
        return ", ".join(f"part {part}: {why}" for part, why in store.verify(name).items())
    except KVStoreError as error:  # its manifest
        return error.message
