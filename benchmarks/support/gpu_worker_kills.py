"""kill -9 of the GPU tier's worker again and again: are blocks and device memory what they were?

Owns the tier until the question has been answered.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing

from kvstore_cuda.device import CudaDevice
from kvstore_tiers.base import Slot, TierState
from kvstore_tiers.gpu import GpuTier
from kvstore_tiers.testing.transfers import block, get, put
from support.gpu_answers import Answer, Sizes, known
from support.gpu_free import settled_bytes

PAYLOAD_BYTES = 200_000
PATIENCE_S, LOOK_S = 60.0, 0.02
_END_S = 30.0  # for what is looked at after the last death
_TELL_EACH = 10


def worker_kills(device: int, sizes: Sizes) -> Answer:
    """As many deaths as there is time for, `sizes.kills` at most. Each worker copies something: those that copied
    nothing are started ever more rarely."""
    began_s, driver = time.monotonic(), CudaDevice(device).use_in_this_thread()
    before = settled_bytes(driver)
    tier = GpuTier(sizes.rooms_bytes, device=device, chunk_bytes=2 << 20, bounce_bytes=2 << 20)
    killed = copies = 0
    with closing(tier):
        slots = {number: put(tier, *block(number, PAYLOAD_BYTES)) for number in range(1, 1 + sizes.blocks // 4)}
        taken = settled_bytes(driver)
        last_s = began_s + max(sizes.tools_s - _END_S, sizes.tools_s / 2)
        while killed < sizes.kills and time.monotonic() < last_s:
            os.kill(tier.worker_process, signal.SIGKILL)
            killed += 1
            _wait_for_worker(tier, killed + 1)
            number = 1 + killed % len(slots)
            if not _is_there(tier, number, slots[number]):
                return Answer(False, f"block {number} was lost by kill -9 of the worker number {killed}")
            copies += 1
            if killed % _TELL_EACH == 0:
                known(f"{killed} kill -9 of the worker, no block lost so far", {"kills": killed})
        kept = sum(_is_there(tier, number, slot) for number, slot in slots.items())
        grown = max(0, taken - settled_bytes(driver, taken))
    lost = max(0, before - settled_bytes(driver, before))
    says = (
        f"{killed} of {sizes.kills} kill -9 of the worker: {kept} of {len(slots)} blocks kept, {grown} bytes of device "
        f"memory more while the tier is open, {lost} lost once it is closed"
    )
    figures = {"kills": killed, "lost bytes": lost, "grown bytes": grown, "kept": kept, "copies between deaths": copies}
    return Answer(kept == len(slots) and grown == lost == 0, says, figures)


def _wait_for_worker(tier: GpuTier, starts: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while tier.worker_starts < starts or not tier.worker_process or tier.statistics().state is not TierState.OK:
        if time.monotonic() > deadline_s:
            raise RuntimeError("no worker came back")
        time.sleep(LOOK_S)


def _is_there(tier: GpuTier, number: int, slot: Slot | None) -> bool:
    header, payload = block(number, PAYLOAD_BYTES)
    if slot is None:
        return False
    outcome, found = get(tier, slot, header.key, payload.nbytes)
    return outcome.ok and bool((found == payload).all())
