"""What only a GPU can answer: the questions that the GPU tier's design and the engine's kernels rest on.

`make gpu-check` runs it. Each answer is one line; speeds are ratios against one large copy of pinned memory in the same
run. Exits with 1 when a promise of the design does not hold, with 2 when there is no GPU to ask.
Owns nothing that outlives it: what may break a context runs in a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import mmap
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from queue import SimpleQueue

import numpy as np
import xxhash
from support.gpu_card import CudaCard
from support.gpu_kernels import KERNEL_QUESTIONS, Card

from kvstore_console.units import human_bytes
from kvstore_engine.kernels.cuda import CudaError
from kvstore_proto.cuda_copies import Run
from kvstore_proto.cuda_driver import DriverError
from kvstore_proto.nvrtc import CompileError
from kvstore_tiers.gpu.checksums import Checksums
from kvstore_tiers.gpu.driver import Driver, NoDriver
from kvstore_tiers.gpu.events import Events

CHUNK_BYTES, BLOCK_BYTES = 64 << 20, 1 << 20
PIECES_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
ROUNDS = 5
Answer = tuple[bool, str]


def pinned(driver: Driver, nbytes: int) -> tuple[mmap.mmap, int]:
    mapping = mmap.mmap(-1, nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    driver.register(address, nbytes)
    return mapping, address


def copy(driver: Driver, runs: list[Run], *, to_device: bool) -> float:
    """Seconds until it has ended."""
    stream = driver.stream()
    began_s = time.perf_counter()
    driver.copy(runs, to_device=to_device, stream=stream)
    driver.synchronize(stream)
    return time.perf_counter() - began_s


def registers_read_only(device: int) -> Answer:
    """Whether an arena that a client maps read-only can be registered, and copied from."""
    driver = Driver(device)
    descriptor = os.memfd_create("arena")
    os.write(descriptor, b"arena..." * (CHUNK_BYTES // 8))
    mapping = mmap.mmap(descriptor, CHUNK_BYTES, prot=mmap.PROT_READ)
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    driver.register(address, CHUNK_BYTES, read_only=True)
    at = driver.map(driver.create(CHUNK_BYTES), CHUNK_BYTES)
    copy(driver, [Run(at, address, CHUNK_BYTES)], to_device=True)
    back, to = pinned(driver, CHUNK_BYTES)
    copy(driver, [Run(to, at, CHUNK_BYTES)], to_device=False)
    return back[:] == mapping[:], "a memfd that is mapped read-only is registered, and copied from"


def read_only_access_holds(device: int) -> Answer:
    """Whether an importer that maps device memory read-only cannot write to it."""
    driver = Driver(device)
    at = driver.map(driver.create(CHUNK_BYTES), CHUNK_BYTES, read_only=True)
    _, source = pinned(driver, CHUNK_BYTES)
    try:
        copy(driver, [Run(at, source, CHUNK_BYTES)], to_device=True)
    except DriverError as error:
        return True, f"a write to device memory that is mapped read-only fails: {error}"
    return False, "a write to device memory that is mapped read-only WENT THROUGH"


def _make_and_wait(device: int, pipe: Connection) -> None:
    driver = Driver(device)
    handle = driver.create(CHUNK_BYTES)
    at = driver.map(handle, CHUNK_BYTES)
    mapping, source = pinned(driver, CHUNK_BYTES)
    mapping[:] = b"survives" * (CHUNK_BYTES // 8)
    copy(driver, [Run(at, source, CHUNK_BYTES)], to_device=True)
    pipe.send(DupFd(driver.export_descriptor(handle)))
    signal.pause()


def memory_outlives_its_maker(device: int) -> Answer:
    """Whether memory lives while a process without a context holds its descriptor, over the kill -9 of its maker."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    maker = spawn.Process(target=_make_and_wait, args=(device, theirs))
    maker.start()
    descriptor = ours.recv().detach()
    maker.kill()
    maker.join()
    driver = Driver(device)
    held, _ = driver.memory_bytes()
    at = driver.map(driver.import_descriptor(descriptor), CHUNK_BYTES, read_only=True)
    back, to = pinned(driver, CHUNK_BYTES)
    copy(driver, [Run(to, at, CHUNK_BYTES)], to_device=False)
    is_there = back[:] == b"survives" * (CHUNK_BYTES // 8)
    return is_there, f"device memory outlives the kill -9 of its maker ({human_bytes(held)} free meanwhile)"


def speeds(device: int) -> Answer:
    """Copies in pieces against one large copy, and what queueing a piece costs."""
    driver = Driver(device)
    at = driver.map(driver.create(CHUNK_BYTES), CHUNK_BYTES)
    _, host = pinned(driver, CHUNK_BYTES)
    said = []
    for to_device in (True, False):
        large_s = min(
            copy(driver, [_run(at, host, 0, CHUNK_BYTES, to_device)], to_device=to_device) for _ in range(ROUNDS)
        )
        ratios = []
        for nbytes in PIECES_BYTES:
            offsets = range(0, CHUNK_BYTES, 2 * nbytes)
            runs = [_run(at, host, offset, nbytes, to_device) for offset in offsets]
            took_s = min(copy(driver, runs, to_device=to_device) for _ in range(ROUNDS))
            ratios.append(f"{nbytes >> 10} KiB {large_s / 2 / took_s:.2f}x")
        way = "to the device" if to_device else "to the host"
        said.append(f"{way}: one copy {CHUNK_BYTES / large_s / 1e9:.1f} GB/s, batches of {', '.join(ratios)}")
    return True, "; ".join(said)


def checksums(device: int) -> Answer:
    """Checksums of device memory by the GPU tier's kernel: whether they are xxhash's, and how fast."""
    driver = Driver(device)
    at = driver.map(driver.create(CHUNK_BYTES), CHUNK_BYTES)
    mapping, host = pinned(driver, CHUNK_BYTES)
    np.frombuffer(mapping, np.uint64)[:] = np.random.default_rng(1).integers(0, 2**63, CHUNK_BYTES // 8)
    copy(driver, [Run(at, host, CHUNK_BYTES)], to_device=True)
    found: SimpleQueue[tuple[Sequence[int], DriverError | None]] = SimpleQueue()
    kernel = Checksums(driver, Events(driver), lambda _, sums, failure: found.put((sums, failure)))
    said, holds = [], True
    for count in (1, CHUNK_BYTES // BLOCK_BYTES):
        ranges = [(at + block * BLOCK_BYTES, BLOCK_BYTES) for block in range(count)]
        took_s = []
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            kernel.start([(0, ranges)])
            sums, failure = found.get()
            took_s.append(time.perf_counter() - began_s)
            if failure is not None:
                raise failure
        wanted = [xxhash.xxh3_64_intdigest(mapping[start - at : start - at + nbytes]) for start, nbytes in ranges]
        holds = holds and list(sums) == wanted
        said.append(f"{count} x {human_bytes(BLOCK_BYTES)} {count * BLOCK_BYTES / min(took_s) / 1e9:.1f} GB/s")
    verdict = "those of xxhash" if holds else "WRONG"
    return holds, f"checksums of device memory are {verdict}; launch included: {', '.join(said)}"


def _run(device: int, host: int, offset: int, nbytes: int, to_device: bool) -> Run:
    ends = (device + offset, host + offset)
    return Run(*(ends if to_device else ends[::-1]), nbytes)


def of_card(question: Callable[[Card], Answer], device: int) -> Answer:
    return question(CudaCard(device))


QUESTIONS: tuple[Callable[[int], Answer], ...] = (
    registers_read_only, read_only_access_holds, memory_outlives_its_maker, speeds, checksums,
    *(partial(of_card, question) for question in KERNEL_QUESTIONS),
)  # fmt: skip


def _name(number: int) -> str:
    question = QUESTIONS[number]
    return str((question.args[0] if isinstance(question, partial) else question).__name__)


def _ask(number: int, device: int, pipe: Connection) -> None:
    try:
        pipe.send(QUESTIONS[number](device))
    except (DriverError, NoDriver, CompileError, CudaError) as error:
        pipe.send((False, f"{_name(number)}: {error}"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the CUDA device (default: %(default)s)")
    device = parser.parse_args(arguments).device
    try:
        driver = Driver(device)
    except NoDriver as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    free, total = driver.memory_bytes()
    today = datetime.date.today().isoformat()
    print(f"{today}: {driver.name}, {human_bytes(free)} of {human_bytes(total)} free")
    holds = True
    spawn = multiprocessing.get_context("spawn")
    for number in range(len(QUESTIONS)):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_ask, args=(number, device, theirs))
        process.start()
        theirs.close()
        try:
            is_well, says = ours.recv()
        except EOFError:
            is_well, says = False, f"{_name(number)}: its process died"
        process.join()
        print(f"{'yes' if is_well else 'NO '}  {says}", flush=True)
        holds = holds and is_well
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
