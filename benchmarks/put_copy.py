"""How fast is a put of 32 blocks of 1 MiB, copy and checksum included, into prefaulted arenas, by a client that has
mapped its memory?

Two figures. Bytes that a producer has written into staging already, as a kernel or a DMA engine does: one message, the
daemon's copy and checksum. And the whole put of arrays, which the client first copies into staging itself: two copies
and a checksum of each byte, so on two cores it informs and has no target. Baseline: one thread's memcpy of the same 32
MiB between touched arrays. Every put goes into slots never used before. Beside each ratio stands what is possible at
all, measured in the same turns: the tier's own copy and checksum without a daemon, messages and headers, by one thread
or two, whichever is faster; for arrays, with the client's copy running beside it.

Expected: copy and checksum by two threads take 3 ms for memcpy's 3.7, two round trips 1 ms. Seen at first: 10.5 to 16
ms, the daemon spending 14 ms of CPU a put, its control thread woken 39 times. With one completion a message instead of
one a block, headers copied with the GIL held and one header object a block instead of three: 10 ms of CPU, 12 wakings.
With larger messages where the payload is there at once: 9.6 ms instead of 11.0, and 9.2
on a quiet machine. Of these the tier's copy and hash take 5.2 to 6 (with one thread or two; the floor, the same two
threads without a daemon, takes 3.3), two round trips 1.2, the rest is Python on both sides. With one message (`Store`)
instead of a reserve and commits, beside other load and in turns with what was before: 4.7 to 5.0 ms instead of 5.5 to
6.2. Of the daemon's 4.1 ms of CPU then, 2.7 are the copy and the hash, 1.4 the control thread's. With copy and hash in
pieces of 256 KiB (the hash reads what the second-level cache still holds, and what the other threads have there
survives), the first 4 MiB copied while the rest begins, and copy threads that take block after block instead of a share
each: 4.4 to 5.4 ms instead of 5.3 to 5.7, in turns, beside other load (the fastest tenth 4.0 to 4.7 instead of 5.0 to
5.3); the daemon's CPU 3.7 to 4.6 instead of 4.4 to 4.9, the client's 0.6 to 0.8 instead of 1.0; a put of arrays 8.0 to
8.5 of CPU in all instead of 9.2 to 10.8. Tried without gain: parts of 8 MiB, pieces of 64 to 128 KiB (alike) or of 1
MiB (as before), sending the first 4 MiB of arrays at once (one message more costs 0.5 ms of CPU on both sides). What is
left beyond the copies: 1.1 ms of the control thread, of which 0.6 are the 32 slots and rows, 0.6 ms of the client, 0.4
ms of messages on their way. Then a client's staging turned out to be touched for the first time
meanwhile, by a thread that begins with the session (256 MiB take 0.1 s of one of two cores): waiting for it gave 7.0 to
7.3 ms instead of 7.5 to 8.8 on a Sapphire Rapids whose memcpy takes 4.7. There a put that follows 50 ms of rest takes
10.3 ms for the same processor time: threads that wake on idle cores. So each action, memcpy too, is done twice in a row
in each round. With pieces of 512 KiB instead of 256 (fewer hand-overs of the GIL) and no smaller first part (its copies
never began earlier: their threads woke up to find the GIL held) 6.1 to 6.6 ms instead of 7.1 to 7.6, arrays 11.6 to 13
instead of 12.5 to 13.5. Two threads of one process that copy arrays to staging and on to arenas, hash included, one
behind the other, take 7.6 there; the rest of the 12 is processor time of both sides, 18 ms on two cores.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from support.blocks import MIB, Bytes, model, payloads, shared_memory, tokens_of
from support.daemon import bench_daemon, wait_mapped
from support.report import AT_LEAST, Row, main
from support.timing import median, time_each

from kvstore_client import Session
from kvstore_client.payload import Payload
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
        """By so many threads, each an equal share of the blocks."""
        target = self._next_target()
        share = BLOCKS * MIB // threads
        self._together([partial(self._part, target, start, start + share) for start in range(0, len(target), share)])

    def beside_another_copy(self) -> None:
        """One thread copies and hashes, another copies as much: a put of arrays, the client and the daemon at once."""
        self._together(
            [
                partial(self._part, self._next_target(), 0, len(self._source)),
                partial(np.copyto, self._written, self._arrays),
            ]
        )

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
