"""A daemon without room: other blocks, all of them leased, fill its DRAM.

Owns the client that holds them. Never touches what other clients stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from kvstore_client import Fingerprint, LayerGroup, connect

BLOCK_TOKENS = 64
BLOCK_BYTES = 128 * 1024
CHAIN_BLOCKS = 8
PUT_DEADLINE_S = 2.0
MOST_CHAINS = 4096


@contextmanager
def filled(socket_dir: Path) -> Iterator[None]:
    """Fill the daemon's DRAM with leased blocks. Inside the `with` block no other block can be stored, and none can be
    evicted. `socket_dir` is the directory of the daemon's sockets. Raises AssertionError if the memory does not
    become full.
    """
    group = LayerGroup(0, layers=(0,), bytes_per_token_per_layer=BLOCK_BYTES // BLOCK_TOKENS)
    fingerprint = Fingerprint("pressure", weights_digest="pressure", groups=(group,))
    payloads = [np.zeros(BLOCK_BYTES, np.uint8)] * CHAIN_BLOCKS
    with ExitStack() as held:
        session = held.enter_context(
            connect(socket_dir, fingerprint=fingerprint, required=True, deadline_s=20.0, connect_timeout_s=10.0)
        )
        for number in range(MOST_CHAINS):
            tokens = np.arange(CHAIN_BLOCKS * BLOCK_TOKENS, dtype=np.int32) + number * 10_000
            receipt = session.put(tokens, payloads=payloads, durability="none", deadline_s=PUT_DEADLINE_S)
            held.enter_context(session.get(tokens))
            if receipt.visible_blocks < CHAIN_BLOCKS:
                break
        else:
            raise AssertionError(f"{MOST_CHAINS * CHAIN_BLOCKS} blocks were stored and there is still room")
        yield
