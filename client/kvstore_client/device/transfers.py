"""Copies between leases and puts of a session and the engine's paged pool, on a stream of their own.

Owns the loads; stream, buffer and registrations are in its `means`. Never touches the engine's streams but to let them
wait.
Invariants: a lease's place is read only inside the memory that it is in; the buffer is not written again before the
copies out of it have ended; what is loaded counts only if the lease was valid after the copies had ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from kvstore_client.device.means import CopyMeans
from kvstore_client.device.memory import DeviceError, DeviceMemory
from kvstore_client.device.pool import DevicePool
from kvstore_client.device.registered import RegisteredMemory, Registration
from kvstore_client.device.stores import Storing
from kvstore_client.errors import invalid
from kvstore_client.lease import Lease, LeasedBlock
from kvstore_client.memory import Bytes
from kvstore_client.payload import FillSlot, Finish
from kvstore_proto.arena import HEADER_BYTES
from kvstore_proto.cuda_copies import Run

_NO_TIMING = 2


class DeviceTransfers:
    """Of one pool. Use it as a context manager, or `close` it, once all loads have been finished. Raises DeviceError.

    `device` is that of the session (`Session.device`). The arenas that its sessions have mapped are registered in the
    background from now on, other host memory from when it is first used; `registered.want` does it earlier. An engine
    that has several pools gives all their transfers the same `means`, which are then its own to close.
    """

    def __init__(self, device: DeviceMemory, pool: DevicePool, *, means: CopyMeans | None = None) -> None:
        self.pool = pool
        self.device = device
        self._owns_means = means is None
        self.means = means or CopyMeans(device, pool.block_bytes)
        if self.means.buffer.nbytes < pool.block_bytes:
            raise invalid(f"the buffer of {self.means.buffer.nbytes} bytes holds no block of {pool.block_bytes}")

    @property
    def registered(self) -> RegisteredMemory:
        return self.means.registered

    def load(
        self, lease: Lease, pages: Sequence[int], first_block: int = 0, *, after: int = 0, keep: object = None
    ) -> LayerLoad:
        """Copy blocks first_block, first_block + 1, ... of a lease into these pages, layer by layer, in the background.

        `after`: a CUevent (its address) that the engine recorded behind its last use of these pages; 0: none. It must
        exist until all copies have ended: `keep`, what owns it, is referred to as long, also if the load is dropped.
        The lease must not be released before `LayerLoad.finish`. Its headers were verified by the get, and payloads by
        the daemon whenever they came from a slower tier, as for `Lease.payload`. Raises KVStoreError for blocks of
        another size than the pool's, IndexError for blocks or pages that are not there.
        """
        return self.load_all([(lease, first_block, pages)], after=after, keep=keep)

    def load_all(
        self, sources: Sequence[tuple[Lease, int, Sequence[int]]], *, after: int = 0, keep: object = None
    ) -> LayerLoad:
        """As `load`, of several leases, each with its first block and its pages: a layer of all of them comes before
        the next one of any."""
        blocks: list[tuple[LeasedBlock, int]] = []
        for lease, first_block, pages in sources:
            for block, page in enumerate(pages, first_block):
                leased = lease.leased(block)
                self._check_size(leased.payload_bytes)
                self._check_page(page)
                blocks.append((leased, page))
        return LayerLoad(self, [lease for lease, _, _ in sources], blocks, after, keep)

    def payload_of(self, page: int, after: Sequence[int] = ()) -> FillSlot:
        """A payload for `Session.put`, copied from a page of the pool straight into the slot where it is stored. The
        put waits for the copies of all blocks that it sends together at once.

        `after`: CUevents (addresses) that the engine recorded, one for each layer, or one for all: a layer is copied
        once its event has passed. The page must not change until the put has returned. Raises IndexError.
        """
        self._check_page(page)
        if len(after) not in (0, 1, len(self.pool.layers)):
            raise invalid(f"{len(after)} events for {len(self.pool.layers)} layers: give one for each, or one for all")
        return lambda destination: self._store(destination, page, after)

    def close(self) -> None:
        """Wait for copies, unregister all memory. Idempotent. Means that were given stay open."""
        if self._owns_means:
            self.means.close()

    def __enter__(self) -> DeviceTransfers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_size(self, payload_bytes: int) -> None:
        if payload_bytes != self.pool.block_bytes:
            raise invalid(f"a block has {payload_bytes} bytes, a page of the pool {self.pool.block_bytes}")

    def _check_page(self, page: int) -> None:
        if not 0 <= page < self.pool.pages:
            raise IndexError(f"page {page} of a pool of {self.pool.pages}")

    def _store(self, destination: Bytes, page: int, after: Sequence[int]) -> Finish:
        """Begin to fill a slot from a page."""
        self._check_size(destination.nbytes)
        with self.means.using, self.device.current():
            self.means.check_open()
            storing = self.means.stores.begin(self.pool, destination, page, after)
        return lambda: self._finish_store(storing)

    def _finish_store(self, storing: Storing) -> None:
        with self.means.using, self.device.current():
            if not storing.is_over:
                self.means.stores.settle()
        if storing.error is not None:
            raise storing.error


class LayerLoad:
    """Blocks on their way into pages, layer by layer. As a context manager it finishes."""

    def __init__(
        self,
        transfers: DeviceTransfers,
        leases: Sequence[Lease],
        blocks: Sequence[tuple[LeasedBlock, int]],
        after: int,
        keep: object = None,
    ) -> None:
        self._transfers, self._leases, self._blocks, self._after = transfers, leases, blocks, after
        self._kept = keep  # the thread refers to this load until all copies have ended
        self._taken: list[Registration] = []
        layers = range(len(transfers.pool.layers))
        self._queued = [threading.Event() for _ in layers]
        self._error: BaseException | None = None
        self._is_over = False
        self._ending = threading.Lock()  # of that, and of the events until then
        self._events: list[Any] = []
        with transfers.device.current(), contextlib.ExitStack() as undo:
            undo.callback(self._destroy_events)
            for _ in layers:
                self._events.append(transfers.device.call("cuEventCreate", _NO_TIMING))
            self._thread = threading.Thread(target=self._run, name="kvstore-load", daemon=True)
            self._thread.start()
            undo.pop_all()

    def wait(self, layer: int, stream: int) -> None:
        """Let what is queued on the engine's stream (a CUstream's address) from now on run after this layer has come.
        Waits itself until the layer's copies are queued. Raises what kept them from it, such as DeviceError. Another
        thread may call `finish` meanwhile."""
        device = self._transfers.device
        self._queued[layer].wait()
        with self._ending:
            if self._error is not None:
                raise self._error
            if self._is_over:  # all copies have ended, and the events are gone
                return
            with device.current():
                device.call("cuStreamWaitEvent", device.driver.CUstream(stream), self._events[layer], 0)

    def finish(self) -> bool:
        """Wait until all copies have ended. Whether all leases were valid then: otherwise the pages hold nothing of
        use. Raises what went wrong, such as DeviceError."""
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
            with self._transfers.means.using, self._transfers.device.current():
                self._copy()
        except BaseException as error:  # raised again where the caller waits
            self._error = error
        finally:
            for queued in self._queued:
                queued.set()

    def _copy(self) -> None:
        means = self._transfers.means
        means.check_open()
        try:
            means.stores.settle()  # they have the buffer
            bounced = self._bounced()
            if self._after:
                means.stream.wait(self._after)
            for layer, queued in enumerate(self._queued):
                self._queue_layer(layer, bounced)
                means.device.call("cuEventRecord", self._events[layer], means.stream.handle)
                queued.set()
            means.stream.synchronize()
        except BaseException:
            means.device.quietly("cuStreamSynchronize", means.stream.handle)  # the lease's bytes are in use until then
            raise
        finally:
            for taken in self._taken:
                means.registered.give_back(taken)

    def _bounced(self) -> list[bool]:
        """Of each block whether it is in host memory that is not registered."""
        found = []
        for block, _ in self._blocks:
            taken = None
            if block.chunk is None:
                start = block.offset + HEADER_BYTES
                taken = self._transfers.means.registered.take(block.arena, start, block.payload_bytes)
            if taken is not None:
                self._taken.append(taken)
            found.append(block.chunk is None and taken is None)
        return found

    def _queue_layer(self, layer: int, bounced: Sequence[bool]) -> None:
        means, pool = self._transfers.means, self._transfers.pool
        start, nbytes = pool.extent(layer)
        from_host: list[Run] = []
        on_device: list[Run] = []
        used = 0
        for (block, page), by_buffer in zip(self._blocks, bounced, strict=True):
            source, runs = _payload_address(block), from_host if block.chunk is None else on_device
            if by_buffer:
                if used == 0 or used + nbytes > means.buffer.nbytes:
                    means.stream.queue(from_host, "to device")
                    from_host.clear()
                    used = 0
                    means.stream.synchronize()
                at = means.buffer_address + used
                ctypes.memmove(at, source + start, nbytes)
                used += nbytes
                source = at - start
            for piece in pool.pieces(layer, page):
                runs.append(Run(piece.address, source + piece.offset, piece.nbytes))
        means.stream.queue(from_host, "to device")
        means.stream.queue(on_device, "on device")


def _payload_address(block: LeasedBlock) -> int:
    """In device or host memory; the get has seen that the payload is inside."""
    start: int = block.offset + HEADER_BYTES
    if block.chunk is not None:
        return block.chunk.address + start
    return int(block.arena.__array_interface__["data"][0]) + start
