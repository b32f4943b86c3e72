"""The process that judges records ahead: `python -m kvstore_tiers.nvme.early_scan_process SLABS QUEUE MEMORY TELLING`.

SLABS is the directory of the slabs; the others are descriptors, which early_scan.py made: slabs to take, memory for
columns, and a pipe that is told of each slab in a line. Reads the slabs while NumPy is loaded; changes nothing. It ends
when no slab is left, or when it tells and nobody listens.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from kvstore_tiers.nvme.region_reader import RegionReader
from kvstore_tiers.nvme.slab_queue import SlabQueue


def main(slabs: str, queue: str, memory: str, telling: str) -> None:
    reading = RegionReader(Path(slabs), SlabQueue(int(queue)))
    from kvstore_tiers.nvme.slab_judge import SlabJudge

    judge = SlabJudge(int(memory))
    for region in reading:
        told = judge.judge(region)
        if told is not None:
            os.write(int(telling), told.line())
        reading.give_back(region)


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main(*sys.argv[1:])
