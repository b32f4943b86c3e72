"""Warm restart: blocks that were in DRAM and on GPUs when the former daemon ended are served by this one.

The module owns which descriptors are kept. Of the kept ones, arenas that are whole and fit are taken over, the rest is
freed at once. The ledger records the tiers' actions. Payload is never read: a valid header vouches for its block
(`kvstore_tiers.adoption`). A chunk of device memory is kept as two descriptors: its shadow, which is an arena like any
other, and the memory itself. For a GPU's process a pidfd is kept: the device of a killed daemon may for a moment still
write to DRAM and to its own memory.

Invariants: nothing is taken over before the GPU's process is gone; an arena is kept before the ledger names it, and
named before a block is in it; memory that was not taken over is freed, even while former clients map it (device memory:
when they unmap it); each tier's capacity holds throughout.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvstore_console.units import human_bytes
from kvstore_proto.arena import DEVICE_ARENAS
from kvstore_tiers import failpoints
from kvstore_tiers.adoption import AdoptedArena
from kvstore_tiers.arena import Arena, ArenaRecord
from kvstore_tiers.arena_memory import ForeignMemory, empty_memory
from kvstore_tiers.base import Slot, Tier
from kvstore_tiers.host import HostTier
from kvstored.clients.tenants import TenantDirectory
from kvstored.clock import Clock
from kvstored.config.tiers import SharedSection
from kvstored.lifetime.recovery import ArenaImport
from kvstored.lifetime.warm.descriptor_holder import DescriptorHolder, HolderError, no_listener
from kvstored.lifetime.warm.holders import choose_holder, dismiss_others
from kvstored.lifetime.warm.ledger import ForeignLedger, Ledger, tier_of_chunk
from kvstored.store.blocks import Residency
from kvstored.telemetry import Counters

if TYPE_CHECKING:
    from kvstore_tiers.gpu import GpuTier

log = logging.getLogger(__name__)
failpoints.declare("warm.arena-taken-over", "an arena of the process before is taken over, others are not yet")
LEDGER_NAME = "ledger"
GPU_KIND = "gpu"
LOOK_S = 1.0
_MEMORY = "g"  # what the name of a descriptor of device memory begins with
_WORKER = "w"  # and of the pidfd of a GPU's process
WORKERS_END_S = 10.0  # they are killed with their daemon; the driver takes some time to let go
SOON_S = 0.05  # between two tries to have kept what is not kept yet: a kill would lose it
Place = tuple[int, int]


@dataclass(slots=True)
class Adopted:
    """The memory that was taken over from the former process. `rows` maps each place (container and offset) to the row
    of the block there. `retired` has slots whose blocks are gone but which clients may still read, with the tenant of
    each. `containers` are the arenas and chunks taken over."""

    rows: dict[Place, int] = field(default_factory=dict)
    retired: dict[Place, tuple[Slot, int]] = field(default_factory=dict)
    containers: set[int] = field(default_factory=set)
    dropped_arenas: int = 0
    dropped_slots: int = 0


class WarmRestart:
    """The part that keeps the memory of the DRAM tier and of GPU tiers over a restart, made by `open_warm`. Tiers
    notify it of new memory. Call `adopt` once, before any client is served; run `run` as a task.
    """

    def __init__(self, holder: DescriptorHolder, ledger: Ledger, kept: dict[str, int]) -> None:
        self.holder = holder
        self.ledger = ledger
        self._kept = kept  # descriptors of the process before, by name
        self._arenas: dict[int, Arena] = {}
        self._unlisted: dict[str, Arena] = {}  # not kept yet, so not in the ledger
        self._memories: dict[int, int] = {}  # descriptors of chunks of device memory, ours, by number
        self._workers: dict[int, int] = {}  # pidfds, by process
        self._of_devices = threading.Lock()  # which of their memory is held: tiers say so on threads of their own

    def adopt(self, tiers: Sequence[Tier], residency: Residency, tenants: TenantDirectory, clock: Clock) -> Adopted:
        """Give the kept arenas and chunks to the `tiers`, and their blocks to the index, as far as capacities allow.
        Return what was taken over. Blocks that NVMe has too must be in `residency` already.
        """
        adopted = Adopted()
        for record in sorted(self.ledger.arenas(), key=lambda record: -record.handed_out * record.slot_bytes):
            on_device = record.number >= DEVICE_ARENAS
            position = tier_of_chunk(record.number) if on_device else residency.mapped
            tier = tiers[position] if position < len(tiers) else None
            name, memory_name = _name(record.number), _memory_name(record.number)
            descriptor, memory = self._kept.pop(name, -1), self._kept.pop(memory_name, -1)
            found, why = _take_over(tier, record, descriptor, memory)
            if found is None:
                what = "chunk of GPU memory" if on_device else "arena"
                log.warning("%s %d of the process before is dropped: %s", what, record.number, why)
                adopted.dropped_arenas += 1
                self.ledger.forget_arena(record.number)
                self._part_with(name, descriptor)
                if on_device:
                    self._part_with(memory_name, memory)
                continue
            if isinstance(tier, HostTier):
                self._arenas[found.container] = tier.arena(found.container)
            elif tier is not None:
                self._keep_chunk(cast("GpuTier", tier).shadow_of(found.container), descriptor, memory)
            adopted.containers.add(found.container)
            tenant = residency.tenant(record.owner)
            adopted.dropped_slots += found.damaged_slots
            adopted.retired |= {(slot.container, slot.offset): (slot, tenant) for slot in found.retired}
            importer = ArenaImport(tiers[position], position, residency, tenants, clock.monotonic_ns(), clock.wall_ns())
            importer.enter(found, tenant)
            adopted.rows |= importer.rows
            adopted.dropped_slots += importer.dropped_slots
            failpoints.hit("warm.arena-taken-over")
        for name, descriptor in self._kept.items():
            self._part_with(name, descriptor)
        self._kept.clear()
        return adopted

    def _keep_chunk(self, shadow: Arena | None, descriptor: int, memory: int) -> None:
        """Keep the descriptors of an adopted chunk, which the holder has already."""
        assert shadow is not None
        os.close(descriptor)  # the shadow has its own
        self._arenas[shadow.number] = shadow
        self._memories[shadow.number] = memory

    @property
    def keeps_device_memory(self) -> bool:
        return bool(self._memories)

    def count(self, adopted: Adopted, counters: Counters) -> None:
        counters.add("warm_blocks", len(adopted.rows))
        counters.add("warm_dropped_arenas", adopted.dropped_arenas)
        counters.add("warm_dropped_slots", adopted.dropped_slots)

    async def run(self) -> None:
        """Retry to send descriptors to their keeper, and start another keeper if it is gone. Run it as a task."""
        loop, behind = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(behind.set)

        self.holder.on_behind = wake
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await behind.wait()
                behind.clear()
                self.look()
                while self.holder.is_behind:
                    await asyncio.sleep(SOON_S)
                    self.look()
        finally:
            self.holder.on_behind = no_listener

    def look(self) -> None:
        for name in self.holder.retry():
            self._list(name)
        if not self.holder.lost:
            return
        try:
            self.holder.reopen()
        except HolderError as error:
            log.warning("blocks in memory would not survive a restart now: %s", error)
            return
        log.warning("the %s that keeps our memory had gone; a new one keeps it now", self.holder.name)
        self.holder.keep(LEDGER_NAME, self.ledger.fd)
        for arena in list(self._arenas.values()):
            if self.holder.keep(_name(arena.number), arena.fd):
                self._list(_name(arena.number))
        for number, memory in list(self._memories.items()):
            self.holder.keep(_memory_name(number), memory)
        with self._of_devices:
            for process, pidfd in self._workers.items():
                self.holder.keep(_worker_name(process), pidfd)

    def settle(self) -> None:
        """Send all descriptors of memory that are not kept yet to the process that keeps them, since the DRAM tier is
        about to give up its arenas."""
        for name in self.holder.settle():
            self._list(name)

    def close(self, *, forget: bool) -> None:
        """Close the connection to the process that keeps the descriptors, after the DRAM tier has given up its arenas.
        With `forget`, no memory is kept for a next process."""
        if forget:
            self.holder.drop(LEDGER_NAME)
            for number in [each for each in self._arenas if each >= DEVICE_ARENAS]:  # their tiers left them
                self.released(number)
        self.holder.close(forget=forget)
        self.ledger.close()
        for descriptor in (*self._memories.values(), *self._workers.values()):
            os.close(descriptor)
        self._memories.clear()
        self._workers.clear()

    # As the host tier's witness

    def made(self, arena: Arena) -> None:
        self._arenas[arena.number] = arena
        self.ledger.number_taken(arena.number)  # even if it is not kept: clients map it under that number
        if self.holder.keep(_name(arena.number), arena.fd):
            self.ledger.add_arena(arena.record)
        else:
            self._unlisted[_name(arena.number)] = arena

    def changed(self, arena: Arena) -> None:
        self.ledger.change_arena(arena.record)

    def given_up(self, number: int) -> None:
        self._unlisted.pop(_name(number), None)
        self.ledger.forget_arena(number)

    def released(self, number: int) -> None:
        with self._of_devices:
            self._arenas.pop(number, None)
            self.holder.drop(_name(number))
            memory = self._memories.pop(number, -1)
            if memory >= 0:
                self.holder.drop(_memory_name(number))
                os.close(memory)

    def has_memory(self, number: int, descriptor: int) -> None:
        """Keep the device memory `descriptor` of the chunk `number`. It is called in a thread of the tier. If no
        descriptor can be made, the chunk's blocks end with this process.
        """
        with self._of_devices, contextlib.suppress(OSError):
            if number in self._arenas:  # not given up meanwhile
                memory = self._memories[number] = os.dup(descriptor)
                self.holder.keep(_memory_name(number), memory)

    def worker_started(self, process: int) -> None:
        with self._of_devices, contextlib.suppress(OSError):
            pidfd = self._workers[process] = os.pidfd_open(process)
            self.holder.keep(_worker_name(process), pidfd)

    def worker_ended(self, process: int) -> None:
        with self._of_devices:
            pidfd = self._workers.pop(process, -1)
            if pidfd >= 0:
                self.holder.drop(_worker_name(process))
                os.close(pidfd)

    # Inside

    def _list(self, name: str) -> None:
        """Enter an arena, which is kept now, into the ledger if it was not there before."""
        arena = self._unlisted.pop(name, None)
        if arena is not None:
            self.ledger.add_arena(arena.record)

    def _part_with(self, name: str, descriptor: int) -> None:
        """Free memory that was not taken over."""
        if descriptor >= 0:
            empty_memory(descriptor)
            os.close(descriptor)
        self.holder.drop(name)


def open_warm(host: SharedSection, state_dir: Path, *, forget: bool = False) -> WarmRestart | None:
    """Return the part that keeps memory over a restart, as the setting `host.warm_restart` asks for, or None if it is
    off. With `forget`, the former process's memory is freed. Raises HolderError.

    Memory that a former process left with another keeper of descriptors, or in a form that this one cannot use, is
    freed."""
    mode = host.warm_restart
    if host.sealed and mode != "off":
        if mode != "auto":
            raise HolderError(
                "host.sealed = true forbids what host.warm_restart needs, to map an arena again: "
                'set host.warm_restart = "off", or host.sealed = false'
            )
        mode = "off"
    holder = choose_holder(mode, state_dir, host.warm_linger_s)
    dismiss_others(holder, state_dir)
    if holder is None:
        return None
    kept = holder.fetch()
    descriptor = kept.pop(LEDGER_NAME, None)
    ledger = None
    why = "that no secret reaches" if forget else "since a process of its GPU may still write there"
    forget = not _outwait_workers(holder, kept) or forget
    if descriptor is not None and forget:
        nbytes = sum(os.fstat(each).st_blocks * 512 for name, each in kept.items() if not name.startswith(_MEMORY))
        log.warning("dropped %s of DRAM, kept by the process before, %s", human_bytes(nbytes), why)
        if on_devices := sum(name.startswith(_MEMORY) for name in kept):
            log.warning("dropped %d chunks of GPU memory, %s", on_devices, why)
        os.close(descriptor)
    elif descriptor is not None:
        try:
            ledger = Ledger(state_dir, descriptor)
        except (ForeignLedger, OSError) as error:
            log.warning("what the process before kept in memory is dropped: %s", error)
            os.close(descriptor)
    if ledger is None:
        ledger = Ledger(state_dir)
        holder.keep(LEDGER_NAME, ledger.fd)
    return WarmRestart(holder, ledger, kept)


def _outwait_workers(holder: DescriptorHolder, kept: dict[str, int]) -> bool:
    """Wait for the former daemon's GPU processes, and drop their descriptors; return False if one does not end."""
    give_up_s = time.monotonic() + WORKERS_END_S
    are_gone = True
    for name in [each for each in kept if each.startswith(_WORKER)]:
        pidfd = kept.pop(name)
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        are_gone = bool(ended.poll(max(0.0, give_up_s - time.monotonic()) * 1000)) and are_gone
        holder.drop(name)
        os.close(pidfd)
    return are_gone


def _take_over(tier: Tier | None, record: ArenaRecord, descriptor: int, memory: int) -> tuple[AdoptedArena | None, str]:
    """Return the content of an arena or chunk that `tier` has taken over; None, and the reason, if it has not. Then a
    host tier has the descriptor; the descriptors of a chunk stay the caller's.
    """
    if descriptor < 0 or (memory < 0 and record.number >= DEVICE_ARENAS):
        return None, "its descriptor was not kept"
    try:
        if record.number < DEVICE_ARENAS and isinstance(tier, HostTier):
            found = tier.adopt(record, descriptor)
        elif tier is not None and tier.info.kind == GPU_KIND:
            found = cast("GpuTier", tier).adopt(record, descriptor, memory)
        else:
            return None, "no tier is for it now"
    except (ForeignMemory, OSError) as error:
        return None, str(error)
    return found, f"{tier.info.name}.capacity has no room for it"


def _name(number: int) -> str:
    return f"a{number}"


def _worker_name(process: int) -> str:
    return f"{_WORKER}{process}"


def _memory_name(number: int) -> str:
    """Return the name of the device memory whose shadow is arena `number`."""
    return f"{_MEMORY}{number}"
