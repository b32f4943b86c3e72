"""The walk over the daemon's own books: finds what is broken, reports it once, is not fooled by what moves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_tiers.base import Slot
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.testing.transfers import block, put
from kvstored.clock import SystemClock
from kvstored.health.integrity import InvariantChecker
from kvstored.lifecycle import Cause
from kvstored.store.blocks import Residency
from kvstored.telemetry import Counters
from tests.reference.tiers import NVME

PAYLOAD_BYTES = 10_000


class Scene:
    """A residency over a real NVMe tier, with two chains in it."""

    def __init__(self, nvme: NvmeTier) -> None:
        self.nvme = nvme
        self.residency = Residency(("host", "nvme"))
        tenant = self.residency.tenant("one")
        self.rows = []
        for number in range(1, 301):
            header, payload = block(number, PAYLOAD_BYTES)
            slot = put(nvme, header, payload)
            assert slot is not None
            row = self.residency.insert(
                tenant, header.key, header.parent, fingerprint_id=1, group=0, depth=number, payload_bytes=PAYLOAD_BYTES,
                now_ns=1,
            )  # fmt: skip
            self.residency.attach(row, NVME, slot, 1)
            self.rows.append(row)
        self.counters = Counters()
        store: Any = SimpleNamespace(
            residency=self.residency, nvme=nvme, clock=SystemClock(), counters=self.counters,
            completions=SimpleNamespace(outstanding=0),
        )  # fmt: skip
        self.walk = InvariantChecker(store, lambda: True)

    def nvme_slot(self, row: int) -> Slot:
        return self.residency.slot(row, NVME)

    def walked(self) -> bool:
        return asyncio.run(self.walk.walk())


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with closing(NvmeTier.open(tmp_path, 16 << 20, slab_bytes=1 << 20, io_threads=1)) as nvme:
        yield Scene(nvme)


def test_sound_books_hold(scene: Scene) -> None:
    assert scene.walked()
    report = scene.walk.report
    assert (report.walks, report.rows, report.broken) == (1, len(scene.rows), [])
    assert report.last_walk_s > 0 and scene.counters["broken_invariants"] == 0


def break_links(scene: Scene) -> str:
    scene.residency.rows.links[scene.rows[5]] += 1
    return "children counted"


def break_bytes(scene: Scene) -> str:
    scene.residency.copies[NVME].bytes_by_tenant[0] += 4096
    return "bytes by tenant"


def share_a_slot(scene: Scene) -> str:
    copies = scene.residency.copies[NVME]
    copies.offset[scene.rows[1]] = copies.offset[scene.rows[2]]
    copies.container[scene.rows[1]] = copies.container[scene.rows[2]]
    return "share the slot"


def free_behind_its_back(scene: Scene) -> str:
    scene.nvme.free(scene.residency.slot(scene.rows[7], NVME))
    return "is not allocated so"


@pytest.mark.parametrize(
    "spoil", [break_links, break_bytes, share_a_slot, free_behind_its_back], ids=lambda spoil: spoil.__name__
)
def test_a_broken_invariant_is_logged_once(scene: Scene, spoil: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    expected = spoil(scene)
    for _ in range(3):
        assert scene.walked()
    assert any(expected in fault for fault in scene.walk.report.broken), scene.walk.report.broken
    assert len(caplog.records) == 1 and "report this as a bug" in caplog.text
    assert scene.counters["broken_invariants"] >= 1


def test_what_moves_during_a_walk_makes_it_count_for_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstored.health.integrity.SLICE_NS", 0)  # a pause after every step

    async def disturbed() -> bool:
        walking = asyncio.create_task(scene.walk.walk())
        await asyncio.sleep(0.02)
        row = scene.rows[-1]
        slot = scene.residency.slot(row, NVME)
        scene.residency.remove(row, Cause.EVICTED, 2)
        scene.nvme.free(slot)
        return await walking

    assert asyncio.run(disturbed()) is False
    assert (scene.walk.report.walks, scene.walk.report.broken) == (0, [])
    monkeypatch.undo()
    assert scene.walked() and scene.walk.report.rows == len(scene.rows) - 1


def test_a_tenant_that_comes_during_a_walk_makes_it_count_for_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstored.health.integrity.SLICE_NS", 0)  # a pause after every step

    async def disturbed() -> bool:
        walking = asyncio.create_task(scene.walk.walk())
        number = 0
        while not walking.done():
            number += 1
            scene.residency.tenant(f"tenant {number}")
            await asyncio.sleep(0)
        return await walking

    assert asyncio.run(disturbed()) is False
    monkeypatch.undo()
    assert scene.walked() and not scene.walk.report.broken


def test_the_scrubber_reading_on_does_not_keep_a_walk_from_its_end(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstored.health.integrity.SLICE_NS", 0)  # a pause after every step

    async def scrubbed() -> bool:
        walking = asyncio.create_task(scene.walk.walk())
        while not walking.done():
            scene.counters.add("scrubbed_bytes", 4096)
            await asyncio.sleep(0.001)
        return walking.result()

    assert asyncio.run(scrubbed()) and scene.walk.report.walks == 1


def test_a_walk_that_is_disturbed_is_tried_again_after_longer_each_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 10:
            raise asyncio.CancelledError

    async def disturbed() -> bool:
        return False

    monkeypatch.setattr("kvstored.health.integrity.asyncio.sleep", sleep)
    monkeypatch.setattr(scene.walk, "walk", disturbed)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scene.walk.run(600))
    assert waits == [600, 1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize("step", ["publish", "detach", "remove", "insert"])
def test_every_move_of_a_block_is_a_change(scene: Scene, step: str) -> None:
    residency, row = scene.residency, scene.rows[-1]
    residency.attach(row, 0, scene.nvme_slot(row), 1, filling=True)
    if step == "detach":
        residency.publish(row, 0, 1)
    moves: dict[str, Any] = {
        "publish": lambda: residency.publish(row, 0, 1),
        "detach": lambda: residency.detach(row, 0),
        "remove": lambda: residency.remove(row, Cause.CORRUPT, 1),
        "insert": lambda: residency.insert(
            0, b"another key" + bytes(5), bytes(16), fingerprint_id=1, group=0, depth=0, payload_bytes=1, now_ns=1
        ),
    }
    before = residency.changes
    moves[step]()
    assert residency.changes != before
