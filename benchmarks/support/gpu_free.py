"""Free memory of a device, once it has settled: the driver takes back what the dead had a while after their end.

Other processes that use the device meanwhile spoil it. Owns nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore_cuda.device import CudaDevice

SAME_S, LONGEST_S, LOOK_S = 1.0, 10.0, 0.05


def settled_bytes(
    driver: CudaDevice, expected: int | None = None, *, clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> int:  # fmt: skip
    """Return the free bytes: with `expected` as soon as they are at least that, without it once they have not changed
    for `SAME_S`; after `LONGEST_S` at the latest."""
    began_s = same_since_s = clock()
    free, _ = driver.memory_bytes()
    while expected is None or free < expected:
        now_s = clock()
        if now_s - began_s >= LONGEST_S or (expected is None and now_s - same_since_s >= SAME_S):
            break
        pause(LOOK_S)
        before, (free, _) = free, driver.memory_bytes()
        if free != before:
            same_since_s = clock()
    return free
