"""The process that holds the CUDA context of one device: `python -m kvstore_tiers.gpu.worker --socket FD --device N`.

The tier starts it, says what to map, copy and checksum (`wire`), and starts another when it dies: all its state is in
the device's memory or known to the tier. It ends when the socket does, and when the context is broken. Invariant: no
packet is answered before earlier ones were obeyed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import NoReturn

from kvstore_cuda.copies import CopyRun, Way
from kvstore_cuda.device import CudaDevice
from kvstore_cuda.driver import DriverError, NoDriver
from kvstore_cuda.nvrtc import CompileError
from kvstore_proto.arena import HEADER_BYTES
from kvstore_tiers.child_processes import receive_packet, send_packet
from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.file_reads import DirectStorage, DirectStorageFailed, FileRead, FileReads
from kvstore_tiers.gpu.streams import Checksums, Events, Range, StreamCopies
from kvstore_tiers.gpu.worker_memory import HostMemory, Unregistered, WorkerDeviceMemory
from kvstore_tiers.image import aligned_up

MAX_TOGETHER = 64  # transfers in one batch: more would delay the end of the first
_PR_SET_PDEATHSIG = 1
BROKEN_STATUS = 3
_WAYS: dict[bytes, Way] = {wire.WRITE: "to device", wire.READ: "to host", wire.MOVE: "on device"}
_Group = tuple[int, ...]  # the number of a run's host memory; of a move, those of both chunks
_GroupedRun = tuple[_Group, CopyRun]


class GpuWorker:
    """The worker process of a GPU tier, as an object: it holds the device's CUDA context and does the copies that the
    tier orders over `sock`. With `checks` it loads the kernel for checksums, with `direct` the library for direct
    storage.
    """

    def __init__(self, sock: socket.socket, driver: CudaDevice, *, checks: bool = False, direct: bool = False) -> None:
        self._sock = sock
        self._driver = driver
        self._events = Events(driver)
        self._copies = StreamCopies(driver, self._events, self._ended)
        self._checksums: Checksums | None = None
        if checks:
            self._checksums = self._load_checksums()
        self._reads = FileReads(driver, self._events, self._load_direct_storage() if direct else None, self._ended)
        self._host = HostMemory(driver, self._events, self._say, self._end_broken)
        self._device = WorkerDeviceMemory(driver, self._events, self._say)
        self._waiting: dict[bytes, list[tuple[int, list[_GroupedRun]]]] = {letter: [] for letter in _WAYS}
        self._unchecked: list[tuple[int, list[Range]]] = []

    def run(self) -> None:
        """Carry out the tier's orders, which arrive as packets on the socket, until the tier closes it."""
        _, total = self._driver.memory_bytes()
        self._say(wire.pack(wire.READY, self._driver.identity, total, self._driver.name))
        while packets := self._receive():
            for packet, descriptors in packets:
                self._obey(packet, descriptors)
            self._flush()

    def _receive(self) -> list[tuple[bytes, list[int]]]:
        """Return one packet, and further ones that have arrived; nothing at the end."""
        packets: list[tuple[bytes, list[int]]] = []
        flags = 0
        while len(packets) < MAX_TOGETHER:
            try:
                packet, descriptors = receive_packet(self._sock, wire.MAX_PACKET_BYTES, flags)
            except BlockingIOError:
                break
            if not packet:
                break
            packets.append((packet, descriptors))
            flags = socket.MSG_DONTWAIT
        return packets

    def close(self) -> None:
        """Wait for the work under way. Memory stays mapped, because the process ends right afterwards."""
        self._events.settle()
        self._events.close()

    def _load_checksums(self) -> Checksums | None:
        made, why = None, ""
        try:
            made = Checksums(self._driver, self._events, self._summed)
        except (CompileError, OSError) as error:  # also where no process can be started for the compiler
            if isinstance(error, DriverError) and error.is_final:
                raise
            why = str(error)
        self._say(wire.pack(wire.ABLE, int(made is not None), text=why))
        return made

    def _load_direct_storage(self) -> DirectStorage | None:
        made, why = None, ""
        try:
            made = DirectStorage()
        except DirectStorageFailed as error:
            why = str(error)
        self._say(wire.pack(wire.DIRECT, int(made is not None), text=why))
        return made

    def _obey(self, packet: bytes, descriptors: list[int]) -> None:
        letter = packet[:1]
        if letter == wire.MOVE:
            self._take_moves(*wire.unpack_moves(packet))
            return
        if letter in self._waiting or letter == wire.CHECK:
            number, pieces = wire.unpack_transfer(packet)
            self._take(letter, number, pieces)
            return
        if letter == wire.LOAD:
            self._load(*wire.unpack_load(packet), descriptors.pop() if descriptors else -1)
            return
        self._flush()
        number, nbytes, _ = wire.unpack(packet)
        descriptor = descriptors[0] if descriptors else -1
        try:
            if letter == wire.MAP:
                self._host.add(*wire.unpack_region(packet, descriptor))
            elif letter == wire.UNMAP:
                self._host.drop(number)
            elif letter in (wire.CREATE, wire.IMPORT):
                self._device.add(number, nbytes, descriptor if letter == wire.IMPORT else -1)
            elif letter == wire.DROP:
                self._device.drop(number)
        finally:
            for stray in descriptors:
                os.close(stray)

    # Transfers

    def _take(self, letter: bytes, number: int, pieces: list[wire.RegionPiece]) -> None:
        try:
            if letter == wire.CHECK:
                self._unchecked.append((number, [self._range(piece) for piece in pieces]))
            else:
                self._waiting[letter].append(
                    (number, [self._run(piece, to_device=letter == wire.WRITE) for piece in pieces])
                )
        except Unregistered:
            self._say_ended(number, wire.UNREGISTERED)
        except KeyError:
            self._say_unmapped(number, [piece.chunk for piece in pieces])

    def _take_moves(self, number: int, moves: list[wire.ChunkMove]) -> None:
        try:
            self._waiting[wire.MOVE].append((number, [self._move(move) for move in moves]))
        except KeyError:
            self._say_unmapped(number, [chunk for move in moves for chunk in (move.source_chunk, move.chunk)])

    def _load(self, number: int, load: wire.FileLoad, descriptor: int) -> None:
        payload_pages = aligned_up(load.payload_bytes)
        host_bytes = HEADER_BYTES + (0 if load.is_direct else payload_pages)
        try:
            device, _ = self._range(wire.RegionPiece(load.chunk, load.chunk_offset, 0, 0, payload_pages))
            address = self._host.address_of(load.region, load.region_offset, host_bytes)
            host = self._host.view(load.region, load.region_offset, host_bytes)
            if descriptor < 0:
                raise KeyError("no descriptor came")
        except KeyError:
            if descriptor >= 0:
                os.close(descriptor)
            self._say_ended(number, self._device.why_missing([load.chunk]) or "its file or memory is not there")
            return
        self._reads.start(
            FileRead(
                number,
                descriptor,
                load.offset,
                load.payload_bytes,
                host,
                address,
                device,
                load.is_direct,
            )
        )

    def _range(self, piece: wire.RegionPiece | wire.ChunkMove) -> Range:
        return self._device.address_of(piece.chunk, piece.chunk_offset, piece.nbytes), piece.nbytes

    def _move(self, move: wire.ChunkMove) -> _GroupedRun:
        to, nbytes = self._range(move)
        source = self._device.address_of(move.source_chunk, move.source_offset, nbytes)
        return (move.source_chunk, move.chunk), CopyRun(to, source, nbytes)

    def _run(self, piece: wire.RegionPiece, *, to_device: bool) -> _GroupedRun:
        device, nbytes = self._range(piece)
        host = self._host.address_of(piece.region, piece.region_offset, nbytes)
        return (piece.region,), CopyRun(device, host, nbytes) if to_device else CopyRun(host, device, nbytes)

    def _flush(self) -> None:
        for letter, waiting in self._waiting.items():
            if waiting:
                self._waiting[letter] = []
                groups: defaultdict[_Group, list[CopyRun]] = defaultdict(list)
                for group, run in (each for _, of_one in waiting for each in of_one):
                    groups[group].append(run)
                self._copies.start([number for number, _ in waiting], groups.values(), _WAYS[letter])
        if self._unchecked:
            batch, self._unchecked = self._unchecked, []
            if self._checksums is not None:
                self._checksums.start(batch)
                return
            for number, _ in batch:
                self._say_ended(number, "this worker has no kernel for checksums")

    def _ended(self, number: int, failure: OSError | None) -> None:
        if isinstance(failure, DriverError) and failure.is_final:
            self._end_broken(failure)
        if failure is not None and failure.errno:
            self._say(wire.pack(wire.UNREAD, number, failure.errno, str(failure)))
        else:
            self._say_ended(number, str(failure or ""))

    def _end_broken(self, failure: DriverError) -> NoReturn:
        print(f"kvstored-gpu: the context is broken ({failure}); a new process takes over", file=sys.stderr)
        os._exit(BROKEN_STATUS)  # the tier fails what was under way

    def _summed(self, number: int, sums: Sequence[int], failure: DriverError | None) -> None:
        if failure is None:
            self._say(wire.pack_sums(number, sums))
        else:
            self._ended(number, failure)

    def _say_unmapped(self, number: int, chunks: Sequence[int]) -> None:
        self._say_ended(number, self._device.why_missing(chunks) or "its memory is not mapped")

    def _say_ended(self, number: int, failure: str) -> None:
        self._say(wire.pack(wire.ENDED, number, text=failure))

    def _say(self, packet: bytes, *descriptors: int) -> None:
        try:
            send_packet(self._sock, packet, descriptors)
        except OSError:
            os._exit(0)  # the tier is gone


def _end_process(died: threading.ExceptHookArgs) -> None:
    print(f"kvstored-gpu: {died.thread and died.thread.name}: {died.exc_value}", file=sys.stderr)
    os._exit(BROKEN_STATUS)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvstore_tiers.gpu.worker",
        description="Copies blocks to and from the memory of one GPU for a kvstored daemon, which starts it by itself.",
    )
    parser.add_argument("--socket", type=int, required=True, metavar="FD", help="an inherited SOCK_SEQPACKET socket")
    parser.add_argument("--device", type=int, required=True, metavar="N", help="the CUDA device, counted from 0")
    parser.add_argument("--checksums", action="store_true", help="compute checksums of blocks on the device, too")
    parser.add_argument("--direct-storage", action="store_true", help="read files by GPUDirect Storage, if it is there")
    chosen = parser.parse_args(arguments)
    for meant_for_the_daemon in (signal.SIGINT, signal.SIGTERM):  # of a terminal, of a service manager
        signal.signal(meant_for_the_daemon, signal.SIG_IGN)
    threading.excepthook = _end_process  # what waits for a thread that has ended would wait for ever
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a call that hangs would outlive the daemon
    with socket.socket(fileno=chosen.socket) as sock:
        try:
            device = CudaDevice(chosen.device).use_in_this_thread()
            device.require_descriptors()
            worker = GpuWorker(sock, device, checks=chosen.checksums, direct=chosen.direct_storage)
            worker.run()
            worker.close()
        except NoDriver as error:
            send_packet(sock, wire.pack(wire.FATAL, 0, text=str(error)))
            return 1
        except (DriverError, ConnectionError) as error:
            print(f"kvstored-gpu: {error}", file=sys.stderr)
            return BROKEN_STATUS
    return 0


if __name__ == "__main__":
    threading.current_thread().name = "kvstored-gpu"
    sys.exit(main())
