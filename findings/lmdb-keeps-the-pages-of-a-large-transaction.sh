#!/bin/sh
# lmdb 3.0.0 (LMDB 0.9.36): the memory of the pages that a write transaction changed stays with the environment after the
# commit. The values are in the file, no reader is open, and malloc_trim gives nothing back; closing the environment
# does. One transaction of 20 MB leaves over 20 MB of anonymous memory, twenty of 1 MB leave hardly more than one of
# them needs. So a process that holds an environment open for long keeps the size of its largest transaction: commit
# in smaller ones, or open the environment again after a large one.
#
# Output seen (anonymous memory, above that before the transactions):
#     1 transaction: over 20 MB after the commit, under 2 MB after the close
#     20 transactions: under 5 MB after the commit, under 2 MB after the close
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet lmdb==3.0.0
"$place/venv/bin/python" - "$place" <<'PYTHON' | tee "$place/output"
import ctypes
import gc
import os
import re
import sys
from pathlib import Path

import lmdb

VALUE_BYTES, ROWS = 960, 21_000


def anonymous_mb() -> float:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


for transactions in (1, 20):
    environment = lmdb.open(f"{sys.argv[1]}/{transactions}", map_size=1 << 30)
    before = anonymous_mb()
    for first in range(0, ROWS, ROWS // transactions):
        with environment.begin(write=True) as transaction:
            for row in range(first, first + ROWS // transactions):
                transaction.put(row.to_bytes(8, "big"), os.urandom(VALUE_BYTES))
    committed = anonymous_mb() - before
    environment.close()
    closed = anonymous_mb() - before
    after = "over 20" if committed > 20 else "under 5" if committed < 5 else f"{committed:.1f}"
    end = "under 2" if closed < 2 else f"{closed:.1f}"
    plural = "" if transactions == 1 else "s"
    print(f"{transactions} transaction{plural}: {after} MB after the commit, {end} MB after the close")
PYTHON
diff - "$place/output" <<'SEEN'
1 transaction: over 20 MB after the commit, under 2 MB after the close
20 transactions: under 5 MB after the commit, under 2 MB after the close
SEEN
