"""A prompt of twelve blocks and a tail that fills none, and what its blocks hold: for clients of the double."""

from __future__ import annotations

import numpy as np

from kvstore_client import Fingerprint, LayerGroup

LAYERS = 4
FINGERPRINT = Fingerprint("m", "w", groups=(LayerGroup(0, "full", 0, tuple(range(LAYERS)), 16),))
BLOCKS = 12
TOKENS = np.arange(64 * BLOCKS + 7, dtype=np.int32)
PAYLOADS = [
    np.random.default_rng(block).integers(0, 256, FINGERPRINT.payload_bytes(), dtype=np.uint8)
    for block in range(BLOCKS)
]
