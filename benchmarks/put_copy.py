"""How fast is a put of 32 blocks of 1 MiB, copy and checksum included, into arenas that were prefaulted?

Two figures. Bytes that a producer has written into staging already, as a kernel or a DMA engine does: one message,
the daemon's copy and checksum. And the whole put of arrays, which the client first copies into staging itself: two
copies and a checksum of each byte, so on two cores it informs and has no target. Baseline: one thread's memcpy of the
same 32 MiB between touched arrays. Every put goes into slots never used before.

Expected: copy and checksum by two threads take 3 ms for memcpy's 3.7, two round trips 1 ms. Seen at first: 10.5 to 16
ms, the daemon spending 14 ms of CPU a put, its control thread woken 39 times. With one completion a commit instead of
one a block, headers copied with the GIL held and one header object a block instead of three: 10 ms of CPU, 12
wakings. With larger commits where the payload is there at once (COMMIT_EVERY_S in the client): 9.6 ms instead of
11.0, and 9.2 on a quiet machine. Of these the tier's copy and hash take 5.2 to 6 (with one thread or two; the floor,
the same two threads without a daemon, takes 3.3), two round trips 1.2, the rest is Python on both sides. With one
message (`Store`) instead of a reserve and commits, beside other load and in turns with what was before: 4.7 to 5.0 ms
instead of 5.5 to 6.2. Of the daemon's 4.1 ms of CPU then, 2.7 are the copy and the hash, 1.4 the control thread's.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Sequence

import numpy as np
import xxhash
from support.blocks import MIB, Bytes, model, payloads, tokens_of
from support.daemon import bench_daemon
from support.report import AT_LEAST, Row, main
from support.timing import median, time_each, time_once

from kvstore_client import Session
from kvstore_client.staging import Payload

BLOCKS = 32
WARM_UP = 2


def measure(quick: bool) -> list[Row]:
    rounds = 4 if quick else 12
    arenas_mib = (2 * rounds + WARM_UP + 2) * (BLOCKS + 1)
    settings = (f"host.capacity={arenas_mib + 512}MiB", "host.staging=256MiB", f"host.prefault_ahead={arenas_mib}MiB")
    data = payloads(BLOCKS, MIB)
    source, target = np.concatenate(data), np.zeros(BLOCKS * MIB, np.uint8)
    target[:] = 1
    whole: list[float] = []
    staged: list[float] = []
    plain: list[float] = []
    floor: list[float] = []
    shared = _SharedCopy(source)
    with bench_daemon(*settings, "nvme.enabled=false") as daemon, daemon.connect(model(MIB)) as session:
        daemon.wait_prefaulted(arenas_mib * MIB)
        puts = _Puts(session, data)
        for _ in range(WARM_UP):
            puts.arrays()
        for _ in range(rounds):
            plain += time_each(lambda: np.copyto(target, source), 2)
            floor += time_each(shared.copy_and_hash, 2)
            whole.append(time_once(puts.arrays))
            staged.append(time_once(puts.written_already))
    gb = BLOCKS * MIB / 1e9
    baseline = gb / median(plain)
    return [
        Row("put_32mib_staged", gb / median(staged), "GB/s", baseline, "memcpy", AT_LEAST, 0.6),
        Row("put_32mib_floor", gb / median(floor), "GB/s", baseline, "memcpy", AT_LEAST),
        Row("put_32mib_from_arrays", gb / median(whole), "GB/s", baseline, "memcpy", AT_LEAST),
    ]


class _SharedCopy:
    """The least that a put can take here: two threads copy from one shared mapping to another and hash the copy, with
    no daemon, no messages and no headers. Shared memory has 4 KiB pages where the system grants it no larger ones."""

    def __init__(self, data: Bytes) -> None:
        self._source, *self._targets = (_shared_memory(data) for _ in range(4))
        self._turn = 0

    def copy_and_hash(self) -> None:
        self._turn += 1
        half = BLOCKS * MIB // 2
        threads = [threading.Thread(target=self._part, args=(start, start + half)) for start in (0, half)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _part(self, start: int, stop: int) -> None:
        target = self._targets[self._turn % len(self._targets)]
        for offset in range(start, stop, MIB):
            block = target[offset : offset + MIB]
            np.copyto(block, self._source[offset : offset + MIB])
            xxhash.xxh3_64_intdigest(block.data)


def _shared_memory(data: Bytes) -> Bytes:
    memory = np.frombuffer(mmap.mmap(-1, len(data), mmap.MAP_SHARED), np.uint8)
    memory[:] = data
    return memory


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
