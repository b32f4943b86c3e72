"""A CUDA device as the kernels' questions want it: memory that is filled and read, and times without launch gaps.

Owns the memory, until the process ends. Times of kernels are of CUDA graphs that hold a call many times: neither
Python's nor the driver's launches are in them.
"""

from __future__ import annotations

import mmap
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_client.device import LinkBudget
from kvstore_client.device.budget import FIRST_SEEN_BYTES, SLICE_BYTES
from kvstore_cuda.copies import CopyRun, Runs
from kvstore_cuda.device import CudaDevice
from kvstore_engine.kernels.cuda.device import Device
from support.gpu_answers import FULL, Sizes
from support.gpu_kernels import Array, Card, Transferred
from support.gpu_memory import on_device, pinned
from support.report import warm

_REPEATS_A_ROUND = 4  # of the rounds: calls in a graph
_THREAD_LOCAL = 1  # a capture that other threads' calls do not end


class CudaCard(Card):
    """Device `index`. `exact`: each array has memory of its own size, so that a tool sees what is beyond its end.
    Raises NoDriver, DriverError, CudaError."""

    launcher: Device

    def __init__(self, index: int, sizes: Sizes = FULL, *, exact: bool = False) -> None:
        self._index, self._sizes, self._exact = index, sizes, exact
        self._on_host: list[mmap.mmap] = []
        self._driver = CudaDevice(index).use_in_this_thread()
        self._stream = self._driver.stream()
        self.launcher = Device(index)
        self.stream = int(self._stream)

    def place(self, array: Array) -> int:
        return self.repeated(array, array.nbytes)

    def repeated(self, array: Array, nbytes: int) -> int:
        address = self._memory(nbytes)
        mapping, host = self._pinned(array.nbytes)
        mapping[: array.nbytes] = array.tobytes()
        starts = range(0, nbytes, array.nbytes)
        runs = Runs.of(CopyRun(address + start, host, min(array.nbytes, nbytes - start)) for start in starts)
        self._driver.copy(runs, "to device", self._stream)
        self._driver.synchronize(self._stream)
        self._driver.unregister(host)
        return address

    def read(self, address: int, like: Array) -> Array:
        mapping, host = self._pinned(like.nbytes)
        self._driver.copy(Runs.of([CopyRun(host, address, like.nbytes)]), "to host", self._stream)
        self._driver.synchronize(self._stream)
        self._driver.unregister(host)
        copied: npt.NDArray[np.generic] = np.frombuffer(mapping[: like.nbytes], like.dtype).reshape(like.shape)
        return copied

    def place_on_host(self, array: Array) -> int:
        mapping, host = self._pinned(array.nbytes)
        mapping[: array.nbytes] = array.tobytes()
        self._on_host.append(mapping)
        return host

    def seconds(self, queue: Callable[[], object], *, in_graph: bool = True) -> float:
        repeats = _REPEATS_A_ROUND * self._sizes.rounds
        if not in_graph:
            warm(lambda: self._queued_s(queue, repeats), self._sizes.warm_s)
            return min(self._queued_s(queue, repeats) for _ in range(1 + self._sizes.rounds)) / repeats
        graph = self._graph(queue, repeats)
        warm(lambda: self._replayed_s(graph), self._sizes.warm_s)
        took = [self._replayed_s(graph) for _ in range(self._sizes.rounds)]
        self._driver.call("cuGraphExecDestroy", graph)
        return min(took) / repeats

    def steps(self, queue: Callable[[], object], launches: int, count: int) -> list[float]:
        graph = self._graph(queue, launches)
        warm(lambda: self._replayed_s(graph), self._sizes.warm_s)
        took = [self._replayed_s(graph) for _ in range(count)]
        self._driver.call("cuGraphExecDestroy", graph)
        return took

    def batch_s(self, runs: Sequence[tuple[int, int, int]], *, to_device: bool) -> float:
        copies = Runs.of(CopyRun(*run) for run in runs)

        def copied_s() -> float:
            began_s = time.perf_counter()
            self._driver.copy(copies, "to device" if to_device else "to host", self._stream)
            self._driver.synchronize(self._stream)
            return time.perf_counter() - began_s

        warm(copied_s, self._sizes.warm_s)
        return min(copied_s() for _ in range(self._sizes.rounds))

    def copied_bytes_s(self) -> float:
        nbytes = self._sizes.copied_bytes
        source, target = self._memory(nbytes), self._memory(nbytes)
        ends = self._driver.driver.CUdeviceptr(target), self._driver.driver.CUdeviceptr(source)
        took_s = self.seconds(lambda: self._driver.call("cuMemcpyDtoDAsync", *ends, nbytes, self._stream))
        return 2 * nbytes / took_s

    def saturated(self, *, by_process: bool) -> AbstractContextManager[Transferred]:
        return self._beside(_transfer, self._sizes.copied_bytes // 4, by_process=by_process)

    def stored(self) -> AbstractContextManager[Transferred]:
        return self._beside(_store, SLICE_BYTES, by_process=False)

    @contextmanager
    def _beside(
        self, copies: Callable[[int, int, Connection], None], nbytes: int, *, by_process: bool
    ) -> Iterator[Transferred]:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        make = spawn.Process if by_process else threading.Thread
        transfer = make(target=copies, args=(self._index, nbytes, theirs))
        transfer.start()
        failure: OSError | None = ours.recv()  # once its first copy has ended
        if failure is not None:
            raise failure

        def reached() -> float:
            ours.send(False)
            rate: float = ours.recv()
            return rate

        try:
            yield reached
        finally:
            ours.send(True)
            transfer.join()

    def _graph(self, queue: Callable[[], object], launches: int) -> Any:
        queue()  # compiles, and warms up
        self._driver.synchronize(self._stream)
        self._driver.call("cuStreamBeginCapture", self._stream, self._driver.driver.CUstreamCaptureMode(_THREAD_LOCAL))
        for _ in range(launches):
            queue()
        return self._driver.call("cuGraphInstantiate", self._driver.call("cuStreamEndCapture", self._stream), 0)

    def _replayed_s(self, graph: Any) -> float:
        began_s = time.perf_counter()
        self._driver.call("cuGraphLaunch", graph, self._stream)
        self._driver.synchronize(self._stream)
        return time.perf_counter() - began_s

    def _queued_s(self, queue: Callable[[], object], repeats: int) -> float:
        began_s = time.perf_counter()
        for _ in range(repeats):
            queue()
        self._driver.synchronize(self._stream)
        return time.perf_counter() - began_s

    def _memory(self, nbytes: int) -> int:
        return (
            int(self._driver.call("cuMemAlloc", max(nbytes, 1)))
            if self._exact
            else on_device(self._driver, max(nbytes, 1))
        )

    def _pinned(self, nbytes: int) -> tuple[mmap.mmap, int]:
        return pinned(self._driver, -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE)


def _transfer(index: int, nbytes: int, pipe: Connection) -> None:
    """Copies to the device, two under way at a time, until the other end says so; answers how fast they have been."""
    try:
        driver = CudaDevice(index).use_in_this_thread()
        target, (_kept, source) = on_device(driver, nbytes), pinned(driver, nbytes)
        streams = driver.stream(), driver.stream()
        run = Runs.of([CopyRun(target, source, nbytes)])
        driver.copy(run, "to device", streams[0])
        driver.synchronize(streams[0])
    except OSError as error:
        pipe.send(OSError(f"nothing can be transferred: {error}"))
        return

    def on_both() -> int:
        for stream in streams:
            driver.synchronize(stream)
            driver.copy(run, "to device", stream)
        return len(streams) * nbytes

    on_both()
    _move_until_told(pipe, on_both)
    for stream in streams:
        driver.synchronize(stream)


def _store(index: int, nbytes: int, pipe: Connection) -> None:
    """Copies to the host as a client's stores make them while an engine decodes, at the rate `auto`, until the other
    end says so; answers how fast they have been."""
    budget = LinkBudget()
    try:
        driver = CudaDevice(index).use_in_this_thread()
        source, (_kept, target) = on_device(driver, nbytes), pinned(driver, nbytes)
        stream, run = driver.stream(), Runs.of([CopyRun(target, source, nbytes)])
        for _ in range(FIRST_SEEN_BYTES // nbytes + 1):  # wait for nothing: they show what the link moves
            _store_one(budget, driver, run, stream)
    except OSError as error:
        pipe.send(OSError(f"nothing can be transferred: {error}"))
        return

    def decoding() -> int:
        budget.decoding(True)
        _store_one(budget, driver, run, stream)
        return nbytes

    _move_until_told(pipe, decoding)


def _move_until_told(pipe: Connection, move: Callable[[], int]) -> None:
    """Call `move`, which returns the bytes that it copied, again and again until the other end stops it; send the
    measured speed.
    """
    pipe.send(None)
    began_s, moved = time.perf_counter(), 0
    while True:
        moved += move()
        if pipe.poll():
            if pipe.recv():
                return
            pipe.send(moved / (time.perf_counter() - began_s))


def _store_one(budget: LinkBudget, driver: CudaDevice, run: Runs, stream: Any) -> None:
    nbytes = int(run.nbytes.sum())
    budget.wait("stores", nbytes)
    began_s = time.perf_counter()
    driver.copy(run, "to host", stream)
    driver.synchronize(stream)
    budget.seen(nbytes, time.perf_counter() - began_s)
