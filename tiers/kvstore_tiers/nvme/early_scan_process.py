"""The early scan's process: `python -m kvstore_tiers.nvme.early_scan_process SLABS QUEUE MEMORY REPORTS`.

SLABS is the directory of the slabs; the others are descriptors that early_scan.py made: the queue of slabs, memory for
columns, and a pipe that gets a line which says how the memory is laid out, then one for each slab. Reads slabs while
NumPy is loaded; changes nothing. It ends when no slab is left, or when the pipe has no reader.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from kvstore_tiers.nvme.region_reader import RegionReader, SlabQueue, SlabSlots


def main(slabs: str, queue: str, memory: str, reports: str) -> None:
    layout = SlabSlots.within(Path(slabs))
    os.write(int(reports), json.dumps(layout).encode() + b"\n")
    regions = RegionReader(Path(slabs), SlabQueue(int(queue)))
    from kvstore_tiers.nvme.shared_columns import SlabScanner

    scanner = SlabScanner(int(memory), layout)
    for region in regions:
        report = scanner.scan(region)
        if report is not None:
            os.write(int(reports), report.line())
        regions.give_back(region)
    os.close(int(reports))  # nothing is written from here on; this process takes a while to end


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main(*sys.argv[1:])
