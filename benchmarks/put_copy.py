"""Measures a put of 32 blocks of 1 MiB, copy and checksum included, into prefaulted arenas, by a client that has mapped
its memory.

Two figures. Bytes that a producer has written into staging already, as a kernel or a DMA engine does: one message, the
daemon's copy and checksum. And the whole put of arrays, which the client first copies into staging itself: two copies
and a checksum of each byte, so on two cores it informs and has no target. Baseline: one thread's memcpy of the same 32
MiB between touched arrays. Every put goes into slots never used before. Beside each ratio stands what is possible at
all, measured in the same turns: the tier's own copy and checksum without a daemon, messages and headers, by one thread
or two, whichever is faster; for arrays, with the client's copy running beside it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from support.daemon import MIB, Bytes, bench_daemon, model, payloads, shared_memory, tokens_of, wait_mapped
from support.report import AT_LEAST, Row, main, median, time_each

from kvstore_client import Session
from kvstore_client.payload import Payload
from kvstore_cuda.host_copies import copy_array, native
from kvstore_tiers.segments import gather_and_checksum, segment_of

BLOCKS = 32
WARM_UP = 2
COPY_AND_HASH, TWO_COPIES = "copy and hash alone", "two copies and a hash alone"


def measure(quick: bool) -> list[Row]:
    rounds = 4 if quick else 12
    arenas_mib = (4 * rounds + WARM_UP + 2) * (BLOCKS + 1)
    settings = (f"host.capacity={arenas_mib + 512}MiB", "host.staging=256MiB", f"host.prefault_ahead={arenas_mib}MiB")
    data = payloads(BLOCKS, MIB)
    source, target = np.concatenate(data), np.zeros(BLOCKS * MIB, np.uint8)
    target[:] = 1
    whole: list[float] = []
    staged: list[float] = []
    plain: list[float] = []
    floors: dict[int, list[float]] = {1: [], 2: []}
    both_copies: list[float] = []
    alone = _CopiesAlone(source)
    native.wait()  # the compiled copies, as the daemon has them
    with bench_daemon(*settings, "nvme.enabled=false") as daemon, daemon.connect(model(MIB)) as session:
        daemon.wait_prefaulted(arenas_mib * MIB)
        puts = _Puts(session, data)
        for _ in range(WARM_UP):
            puts.arrays()
        wait_mapped()
        for _ in range(rounds):
            plain += time_each(lambda: np.copyto(target, source), 2)
            for threads, seconds in floors.items():
                seconds += time_each(lambda threads=threads: alone.copy_and_hash(threads), 2)  # type: ignore[misc]
            both_copies += time_each(alone.beside_another_copy, 2)
            whole += time_each(puts.arrays, 2)
            staged += time_each(puts.written_already, 2)
    gb = BLOCKS * MIB / 1e9
    baseline = gb / median(plain)
    floor = gb / min(map(median, floors.values()))
    both = gb / median(both_copies)
    return [
        Row("put_32mib_staged", gb / median(staged), "GB/s", baseline, "memcpy", AT_LEAST, 0.6, floor, COPY_AND_HASH),
        Row("put_32mib_from_arrays", gb / median(whole), "GB/s", baseline, "memcpy", AT_LEAST, None, both, TWO_COPIES),
    ]


class _CopiesAlone:
    """The least that a put can take here: from one shared mapping to others, which take turns, as into fresh slots."""

    def __init__(self, data: Bytes) -> None:
        self._arrays = data
        self._source, self._written, *self._targets = (shared_memory(len(data)) for _ in range(5))
        self._source[:] = data
        self._turn = 0

    def copy_and_hash(self, threads: int) -> None:
        """Copy and hash the blocks by `threads` threads, each an equal share of the blocks."""
        target = self._next_target()
        share = BLOCKS * MIB // threads
        self._together([partial(self._part, target, start, start + share) for start in range(0, len(target), share)])

    def beside_another_copy(self) -> None:
        """One thread copies and hashes, another copies as much: a put of arrays, the client and the daemon at once."""
        hashed = partial(self._part, self._next_target(), 0, len(self._source))
        self._together([hashed, partial(copy_array, self._written, self._arrays)])

    def _next_target(self) -> Bytes:
        self._turn += 1
        return self._targets[self._turn % len(self._targets)]

    def _together(self, actions: Sequence[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=action) for action in actions[1:]]
        for thread in threads:
            thread.start()
        actions[0]()
        for thread in threads:
            thread.join()

    def _part(self, target: Bytes, start: int, stop: int) -> None:
        for offset in range(start, stop, MIB):
            block = slice(offset, offset + MIB)
            gather_and_checksum(segment_of(target[block]).address, [segment_of(self._source[block])], MIB)


class _Puts:
    """Puts of 32 new blocks, each a conversation of its own."""

    def __init__(self, session: Session, data: list[Bytes]) -> None:
        self._session = session
        self._arrays = data
        self._conversation = 0

    def arrays(self) -> None:
        self._put(self._arrays)

    def written_already(self) -> None:
        """The producer wrote into staging before the clock started: what the last put left there stands for it."""
        self._put([lambda destination: None] * BLOCKS)

    def _put(self, blocks: Sequence[Payload]) -> None:
        self._conversation += 1
        receipt = self._session.put(tokens_of(self._conversation, BLOCKS), payloads=blocks)
        if receipt.stored_blocks != BLOCKS:
            raise RuntimeError(f"stored {receipt.stored_blocks} of {BLOCKS} blocks: {receipt.reason}")


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
