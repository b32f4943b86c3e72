"""Payloads that name themselves: the bytes of a block are a function of its name alone.

Owns one pool of random bytes; a payload is a window of it with its name's digest in front. Any byte of any block can
thus be checked without keeping what was stored, and no two blocks have the same bytes in the same places.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]

_POOL_BYTES = 4 << 20
_POOL = np.random.default_rng(0x70C7).integers(0, 256, _POOL_BYTES, dtype=np.uint8)
_NAME_BYTES = 16


def payload_of(nbytes: int, *name: object) -> Bytes:
    """The `nbytes` bytes of the block with this name."""
    digest = xxhash.xxh3_128_digest(repr(name).encode())
    start = int.from_bytes(digest[:8], "little") % (_POOL_BYTES - nbytes)
    payload = _POOL[start : start + nbytes].copy()
    payload[:_NAME_BYTES] = np.frombuffer(digest, dtype=np.uint8)[:nbytes]
    return payload
