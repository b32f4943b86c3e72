"""A process that lends memory to a Mooncake master, and nothing else: what a storage node does.

python mooncake_holder.py MASTER_ADDRESS SEGMENT_BYTES      prints "holding", then holds until its input ends
"""

from __future__ import annotations

import sys
import time

from mooncake.store import MooncakeDistributedStore

START_TIMEOUT_S = 30.0


def main(master: str, segment_bytes: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        store = MooncakeDistributedStore()
        code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", master)
        if code == 0:
            break
        if time.monotonic() > deadline:
            raise SystemExit(f"the master at {master} was not reached: code {code}")
        time.sleep(0.2)
    print("holding", flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
