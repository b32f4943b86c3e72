"""The shortest proof that the GPU tier works: blocks outlive its worker. The rest of its tests is slow."""

from __future__ import annotations

import os
import signal
from contextlib import closing

import numpy as np

from kvstore_tiers.gpu import GpuTier, GpuWorkerSettings
from kvstore_tiers.testing.transfers import block, get, put
from tests.gpu.emulated import emulated_node


def test_a_block_outlives_the_worker() -> None:
    with closing(
        GpuTier(
            4 << 20, chunk_bytes=2 << 20, bounce_bytes=2 << 20, settings=GpuWorkerSettings(variables=emulated_node())
        )
    ) as tier:
        header, payload = block(1, 50_000)
        slot = put(tier, header, payload)
        worker = tier.worker_process
        assert slot is not None and worker > 0
        os.kill(worker, signal.SIGKILL)
        while tier.worker_process == worker:
            pass  # the system takes a moment to end it
        outcome, copy = get(tier, slot, header.key, payload.nbytes)
        assert outcome.ok, outcome
        assert np.array_equal(copy, payload)
