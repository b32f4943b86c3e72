"""Copies on a device that were taken over from the process before: no lease names them before the device has checked
them, and nothing waits for that.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_proto.arena import DEVICE_ARENAS
from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Slot
from kvstored.completions import CompletionQueue
from kvstored.lifecycle import Cause
from kvstored.store.blocks import Residency
from kvstored.store.transfer import verification
from kvstored.store.transfer.verification import AT_ONCE, DeviceCheck
from kvstored.tier_set import ONLY

VRAM, HOST = 0, 1
BLOCKS = AT_ONCE + 3


class Device:
    """Checks that end when they are ended."""

    def __init__(self) -> None:
        self.verifies = True
        self.asked: list[tuple[Slot, Completion]] = []

    def verify(self, slot: Slot, expect_key: bytes, done: Completion) -> None:
        self.asked.append((slot, done))

    async def is_asked(self, checks: int) -> None:
        async with asyncio.timeout(60):
            while len(self.asked) < checks:
                await asyncio.sleep(0)

    def end(self, kind: OutcomeKind = OutcomeKind.DONE) -> None:
        _, done = self.asked.pop(0)
        done(Outcome(kind, message="as the test says"))


class Books:
    def __init__(self) -> None:
        self.residency = Residency(("vram", "host", "nvme"), mapped=HOST, exported=ONLY[VRAM])
        self.device, self.damaged = Device(), list[int]()
        self.in_use = set[int]()  # rows that another copy of the block holds: what is damaged stays
        completions = CompletionQueue(asyncio.get_running_loop())
        damage: Any = SimpleNamespace(found=self._found)
        device: Any = self.device
        self.check = DeviceCheck(self.residency, {VRAM: device}, completions, damage)
        tenant = self.residency.tenant("tenant")
        self.rows = [self._add(tenant, number) for number in range(BLOCKS)]

    def _found(self, position: int, row: int, message: str) -> None:
        if row not in self.in_use:
            self.damaged.append(row)
            self.residency.remove(row, Cause.CORRUPT, 2)

    def _add(self, tenant: int, number: int) -> int:
        key = (number + 1).to_bytes(16, "big")
        row = self.residency.insert(
            tenant, key, NO_PARENT, fingerprint_id=1, group=0, depth=0, payload_bytes=4096, now_ns=1
        )
        self.residency.attach(row, VRAM, Slot(DEVICE_ARENAS, 8192 * number, 8192, 1), 1)
        return row

    @property
    def is_open(self) -> bool:
        return VRAM in self.residency.readable(ONLY[VRAM])

    def adopt(self) -> asyncio.Task[None]:
        for row in self.rows:
            self.check.owe(VRAM, row)
        return asyncio.ensure_future(self.check.settle())


def test_a_tier_opens_once_all_that_was_taken_over_is_checked() -> None:
    async def run() -> None:
        books = Books()
        assert books.is_open
        settling = books.adopt()
        await books.device.is_asked(AT_ONCE)
        assert not books.is_open and len(books.device.asked) == AT_ONCE
        books.device.end(OutcomeKind.CORRUPT)
        for _ in range(AT_ONCE - 1):
            books.device.end()
        await books.device.is_asked(BLOCKS - AT_ONCE)
        assert not books.is_open and books.damaged == books.rows[:1]
        books.residency.remove(books.rows[-1], Cause.DROPPED, 2)  # while the device checks it
        for _ in range(BLOCKS - AT_ONCE - 1):
            books.device.end()
        books.device.end(OutcomeKind.CORRUPT)
        await settling
        assert books.is_open and books.damaged == books.rows[:1], "what is gone is not damaged"

    asyncio.run(run())


def test_what_the_device_does_not_say_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "AGAIN_S", 0.0)

    async def run() -> None:
        books = Books()
        books.rows = books.rows[:1]
        settling = books.adopt()
        for kind in (OutcomeKind.FAILED, OutcomeKind.FAILED, OutcomeKind.DONE):
            await books.device.is_asked(1)
            assert not books.is_open
            books.device.end(kind)
        await settling
        assert books.is_open and not books.damaged

    asyncio.run(run())


def test_a_tier_stays_closed_while_a_copy_that_is_damaged_cannot_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "AGAIN_S", 0.0)

    async def run() -> None:
        books = Books()
        books.rows = books.rows[:1]
        books.in_use = {books.rows[0]}
        settling = books.adopt()
        await books.device.is_asked(1)
        books.device.end(OutcomeKind.CORRUPT)
        await books.device.is_asked(1)
        assert not books.is_open
        books.in_use.clear()
        books.device.end(OutcomeKind.CORRUPT)
        await settling
        assert books.is_open and len(books.damaged) == 1

    asyncio.run(run())


def test_a_device_that_computes_no_checksums_closes_nothing() -> None:
    async def run() -> None:
        books = Books()
        books.device.verifies = False
        await books.adopt()
        assert books.is_open and not books.device.asked

    asyncio.run(run())
