"""Copies between leases and puts of a session and the engine's paged pool, on a stream of their own.

The module owns the loads and the registrations that they have taken; stream, buffer and registrations are in its
`resources`. It only lets the engine's streams wait. Invariants: a lease's place is read only inside its memory; the
buffer is not written again before the copies out of it have ended; loaded blocks count only if the lease was valid
after the copies had ended. While the engine decodes, stores keep to the rate of the resources' budget, and loads if
they have one. A store waits for it before it takes the buffer, so that no load waits for a store's rate; a load that
the engine waits for waits no more.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from kvstore_client.device.budget import SLICE_BYTES, LinkBudget
from kvstore_client.device.copy_resources import CopyResources
from kvstore_client.device.gather import HIGHEST_PRIORITY, LOWEST_PRIORITY
from kvstore_client.device.memory import DeviceError, DeviceMemory
from kvstore_client.device.pool import DevicePool, Pages
from kvstore_client.device.registered import REGISTER_BYTES, RegisteredMemory, Registration
from kvstore_client.device.stores import Storing
from kvstore_client.errors import invalid
from kvstore_client.lease import Lease, LeasedBlock
from kvstore_client.memory import Bytes
from kvstore_client.payload import FillSlot, Finish
from kvstore_cuda.copies import Numbers, Runs
from kvstore_proto.arena import HEADER_BYTES

_Payload = tuple[tuple[int, ...], int]  # its pages, its address


@dataclass(frozen=True, slots=True, eq=False)
class Payloads:
    """The payloads of one copy: their `addresses`, and their `pages` in the pool, uint64[payloads, pages a block]."""

    pages: Numbers
    addresses: Numbers

    def __getitem__(self, chosen: slice) -> Payloads:
        return Payloads(self.pages[chosen], self.addresses[chosen])


class Sources:
    """The payloads that a load reads, by memory: `on_device`, `on_host` (registered), or `elsewhere` on the host.
    `blocks` has each leased block with its pages of the pool.
    """

    def __init__(self, blocks: Sequence[tuple[LeasedBlock, tuple[int, ...]]], registered: RegisteredMemory) -> None:
        self._registered = registered
        self._taken: list[Registration] = []
        on_device: list[_Payload] = []
        on_host: list[_Payload] = []
        elsewhere: list[_Payload] = []
        known: dict[tuple[int, int], tuple[int, int]] = {}  # by arena and part: one look for all blocks there
        for block, pages in sorted(blocks, key=lambda block: block[1]):
            start = block.offset + HEADER_BYTES
            if block.chunk is not None:
                on_device.append((pages, block.chunk.address + start))
                continue
            part = id(block.arena), start // REGISTER_BYTES
            begin, end = known.get(part) or known.setdefault(part, self._take(block.arena, start))
            address = begin + start
            (on_host if address + block.payload_bytes <= end else elsewhere).append((pages, address))
        self.on_device, self.on_host, self.elsewhere = map(_payloads, (on_device, on_host, elsewhere))

    def _take(self, arena: Bytes, start: int) -> tuple[int, int]:
        """Return the address of an arena, and the end of the part that is registered there from `start` on; 0: nothing
        is.
        """
        begin = int(arena.__array_interface__["data"][0])
        taken = self._registered.take(arena, start, 1)
        if taken is None:
            return begin, 0
        self._taken.append(taken)
        return begin, taken.address + taken.memory.nbytes

    def give_back(self) -> None:
        """End the registration of host memory for this load."""
        for taken in self._taken:
            self._registered.give_back(taken)


def _payloads(found: Sequence[_Payload]) -> Payloads:
    return Payloads(
        np.array([pages for pages, _ in found], np.uint64), np.array([address for _, address in found], np.uint64)
    )


class TwoWayTransfers:
    """The copies in both directions between sessions and an engine's `pool`, on two CUDA streams: `loads` into pages,
    `stores` out of pages, behind the engine's kernels. `close` it after all loads; that closes `budget` too.
    """

    def __init__(self, device: DeviceMemory, pool: DevicePool, budget: LinkBudget | None = None) -> None:
        self.budget = budget or LinkBudget()
        with contextlib.ExitStack() as undo:
            registered = RegisteredMemory(device)
            undo.callback(registered.close)
            resources = []
            for priority in (HIGHEST_PRIORITY, LOWEST_PRIORITY):
                made = CopyResources(
                    device, pool.block_bytes, registered=registered, budget=self.budget, priority=priority
                )
                undo.callback(made.close)
                resources.append(made)
            undo.callback(self.budget.close)  # comes first: what waits for its rate goes on
            self.loads, self.stores = (DeviceTransfers(device, pool, resources=each) for each in resources)
            self._ending = undo.pop_all()

    def close(self) -> None:
        """Wait for all copies and unregister the host memory. A second call does nothing."""
        self._ending.close()


_NO_TIMING = 2


class DeviceTransfers:
    """The copies between sessions on one device and the pages of an engine's `pool`. Use it as a context manager, or
    `close` it once all loads have finished. Raises DeviceError.

    `device` is the session's (`Session.device`). The arenas that its sessions have mapped are registered in the
    background from now on, other host memory from its first use on; `registered.want` does it earlier. If an engine has
    several pools, pass one `resources` to all their transfers, and close it yourself.
    """

    def __init__(self, device: DeviceMemory, pool: DevicePool, *, resources: CopyResources | None = None) -> None:
        self.pool = pool
        self.device = device
        self._owns_resources = resources is None
        self.resources = resources or CopyResources(device, pool.block_bytes)
        if self.resources.buffer.nbytes < pool.block_bytes:
            raise invalid(f"the buffer of {self.resources.buffer.nbytes} bytes holds no block of {pool.block_bytes}")

    @property
    def registered(self) -> RegisteredMemory:
        return self.resources.registered

    def load(
        self, lease: Lease, pages: Sequence[Pages], first_block: int = 0, *, after: int = 0, keep: object = None
    ) -> LayerLoad:
        """Copy blocks `first_block`, `first_block` + 1, ... of `lease` to pages of the pool, layer by layer, in the
        background. `pages` has for each block its page, or its pages. Return the load, to wait for.

        `after`: a CUevent (its address) that the engine recorded behind its last use of these pages; 0: none. It must
        exist until all copies have ended: `keep`, its owner, is kept alive until then, also if the load is dropped. The
        lease must not be released before `LayerLoad.finish`. The get has verified its headers, and the daemon verified
        payloads when they came from a slower tier, as for `Lease.payload`. Raises KVStoreError for blocks of another
        size than the pool's, IndexError for blocks or pages that do not exist.
        """
        return self.load_all([(lease, first_block, pages)], after=after, keep=keep)

    def load_all(
        self, sources: Sequence[tuple[Lease, int, Sequence[Pages]]], *, after: int = 0, keep: object = None
    ) -> LayerLoad:
        """Begin one load of several leases and return the load. Each source is a lease, the number of its first block
        to copy, and the pages of its blocks. Each layer is copied for all leases before the next. `after` and `keep` (a
        CUDA event and its owner) are as in `load`.
        """
        blocks: list[tuple[LeasedBlock, tuple[int, ...]]] = []
        for lease, first_block, pages in sources:
            for block, page in enumerate(pages, first_block):
                leased = lease.leased(block)
                self._check_size(leased.payload_bytes)
                blocks.append((leased, self.pool.pages_of(page)))
        return LayerLoad(self, [lease for lease, _, _ in sources], blocks, after, keep)

    def payload_of(self, page: Pages, after: Sequence[int] = ()) -> FillSlot:
        """Return a payload for `Session.put` that copies a block out of its `page`, or its pages, of the pool. The
        bytes go into staging memory, or with `put.in_place` straight into the slot where the block is stored. The
        put waits for the copies of all blocks that it sends together at once.

        `after`: CUevents (addresses) that the engine recorded, one for each layer, or one for all: a layer is copied
        once its event has passed. The page must not change until the put has returned. Raises IndexError.
        """
        self.pool.pages_of(page)
        if len(after) not in (0, 1, len(self.pool.layers)):
            raise invalid(f"{len(after)} events for {len(self.pool.layers)} layers: give one for each, or one for all")
        return lambda destination: self._store(destination, page, after)

    def close(self) -> None:
        """Wait for copies and unregister memory, but leave resources open that were passed in. A second call does
        nothing.
        """
        if self._owns_resources:
            self.resources.close()

    def __enter__(self) -> DeviceTransfers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_size(self, payload_bytes: int) -> None:
        if payload_bytes != self.pool.block_bytes:
            raise invalid(f"a block has {payload_bytes} bytes, a page of the pool {self.pool.block_bytes}")

    def _store(self, destination: Bytes, page: Pages, after: Sequence[int]) -> Finish:
        """Begin to fill a slot from a page."""
        self._check_size(destination.nbytes)
        budget = self.resources.budget
        if after and budget.limits("stores"):  # what is queued behind an event would come without a pause
            self._wait_for(after)
            after = ()
        is_limited = budget.wait("stores", destination.nbytes)
        with self.resources.using, self.device.current():
            self.resources.check_open()
            slice_bytes = SLICE_BYTES if is_limited else 0
            storing = self.resources.stores.begin(self.pool, destination, page, after, slice_bytes=slice_bytes)
        return lambda: self._finish_store(storing)

    def _wait_for(self, events: Sequence[int]) -> None:
        with self.device.current():
            for event in events:
                self.device.wait(self.device.driver.CUevent(event))

    def _finish_store(self, storing: Storing) -> None:
        if not storing.is_over:
            with self.resources.using:
                if not storing.is_over:
                    self._settle_stores()
        if storing.error is not None:
            raise storing.error

    def _settle_stores(self) -> None:
        """Wait for all stores, for every answer of the driver: the slots may be given to others afterwards. A call that
        fails once is made again; then its results do not count.
        """
        failed: DeviceError | None = None
        with contextlib.ExitStack() as undo:
            for _ in range(2):
                try:
                    undo.enter_context(self.device.current())
                    break
                except DeviceError as error:
                    failed = error
            self.resources.stores.settle(failed)


class LayerLoad:
    """A load under way: a thread copies leased blocks into pages of a pool, layer by layer. Call `finish`, or leave the
    context manager. `seconds` is the time from the call to the end of the last copy, None until then.
    """

    def __init__(
        self,
        transfers: DeviceTransfers,
        leases: Sequence[Lease],
        blocks: Sequence[tuple[LeasedBlock, tuple[int, ...]]],
        after: int,
        keep: object = None,
    ) -> None:
        self._transfers, self._leases, self._blocks, self._after = transfers, leases, blocks, after
        self._kept = keep  # the thread refers to this load until all copies have ended
        self._progress = threading.Condition()  # of what follows
        self._queued = 0  # layers; all of them once an error is known
        self._error: BaseException | None = None
        self._is_over = False
        self.seconds: float | None = None
        self._begun_s = time.perf_counter()
        self._ending = threading.Lock()  # of that, and of the events until then
        self._events: list[Any] = []  # of layers that are queued
        self._thread = threading.Thread(target=self._run, name="kvstore-load", daemon=True)
        self._thread.start()

    def wait(self, layer: int, stream: int) -> None:
        """Make work queued from now on on the engine's CUDA stream run after layer number `layer` was copied. `stream`
        is the CUstream's address. The call waits until the layer's copies are queued, and raises the error that
        prevented them. Another thread may call `finish` meanwhile.
        """
        device = self._transfers.device
        if not 0 <= layer < len(self._transfers.pool.layers):
            raise IndexError(f"layer {layer} of a pool of {len(self._transfers.pool.layers)}")
        with self._transfers.resources.budget.lifted("loads"), self._progress:
            self._progress.wait_for(lambda: self._queued > layer)
        with self._ending:
            if self._error is not None:
                raise self._error
            if self._is_over:  # all copies have ended, and the events are gone
                return
            with device.current():
                device.call("cuStreamWaitEvent", device.driver.CUstream(stream), self._events[layer], 0)

    def wait_quietly(self, layer: int, stream: int) -> None:
        """Call `wait` with `layer` and `stream` without raising its errors: if the stream cannot wait for the layer,
        this thread waits for all copies. Call `finish` later to see whether the load succeeded.
        """
        try:
            self.wait(layer, stream)
        except Exception:  # of the load, or of this wait alone
            with contextlib.suppress(Exception), self._transfers.resources.budget.lifted("loads"):
                self.finish()

    def finish(self) -> bool:
        """Wait until all copies have ended. Return True if every lease was valid then; after False, the content of the
        pages is undefined. Raises the error of the copies, such as DeviceError.
        """
        self._thread.join()
        device = self._transfers.device
        with self._ending:
            if not self._is_over:
                self._is_over = True
                with contextlib.suppress(DeviceError), device.current():
                    self._destroy_events()
        if self._error is not None:
            raise self._error
        return all(lease.valid for lease in self._leases)

    def _destroy_events(self) -> None:
        for event in self._events:
            self._transfers.device.quietly("cuEventDestroy", event)

    def __enter__(self) -> LayerLoad:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def _run(self) -> None:
        try:
            with self._transfers.resources.using, self._transfers.device.current():
                self._copy()
        except BaseException as error:  # raised again where the caller waits
            self._error = error
        finally:
            self.seconds = time.perf_counter() - self._begun_s
            self._say_queued(len(self._transfers.pool.layers))

    def _copy(self) -> None:
        resources = self._transfers.resources
        resources.check_open()
        resources.stores.settle()  # they have the buffer
        sources = Sources(self._blocks, resources.registered)
        try:
            if self._after:
                resources.stream.wait(self._after)
            self._queue_layers(range(1), sources)  # on its way while the copies of the others are listed
            self._queue_layers(range(1, len(self._transfers.pool.layers)), sources)
            resources.stream.synchronize()
        except BaseException:
            # the lease's bytes are in use until then
            resources.device.quietly("cuStreamSynchronize", resources.stream.handle)
            raise
        finally:
            sources.give_back()

    def _queue_layers(self, layers: range, sources: Sources) -> None:
        resources, pool = self._transfers.resources, self._transfers.pool
        from_host = pool.to_pages(sources.on_host.pages, sources.on_host.addresses, layers)
        on_device = pool.to_pages(sources.on_device.pages, sources.on_device.addresses, layers)
        for at, layer in enumerate(layers):
            self._queue_from_host(from_host[at])
            resources.stream.queue(on_device[at], "on device")
            self._queue_by_buffer(layer, sources.elsewhere)
            self._events.append(resources.device.call("cuEventCreate", _NO_TIMING))
            resources.device.record(self._events[layer], resources.stream.handle)
            self._say_queued(layer + 1)

    def _queue_from_host(self, runs: Runs) -> None:
        """Queue copies, in slices, each waited for, while loads keep to a rate."""
        resources = self._transfers.resources
        parts = runs.slices(SLICE_BYTES) if resources.budget.limits("loads") else [runs]
        for part in parts:
            is_limited = resources.budget.wait("loads", int(part.nbytes.sum()))
            resources.stream.queue(part, "to device")
            if is_limited:
                resources.stream.synchronize()

    def _say_queued(self, layers: int) -> None:
        with self._progress:
            self._queued = layers
            self._progress.notify_all()

    def _queue_by_buffer(self, layer: int, payloads: Payloads) -> None:
        resources, pool = self._transfers.resources, self._transfers.pool
        start, nbytes = pool.extent(layer)
        count = resources.buffer.nbytes // nbytes
        for first in range(0, len(payloads.pages), count):
            part = payloads[first : first + count]
            resources.budget.wait("loads", len(part.pages) * nbytes)
            places = resources.buffer_address + np.arange(len(part.pages), dtype=np.uint64) * np.uint64(nbytes)
            resources.stream.synchronize()  # what was in the buffer is in its pages
            for place, address in zip(places.tolist(), part.addresses.tolist(), strict=True):
                ctypes.memmove(place, address + start, nbytes)
            (runs,) = pool.to_pages(part.pages, places - np.uint64(start), range(layer, layer + 1))
            resources.stream.queue(runs, "to device")
