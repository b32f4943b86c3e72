"""Blocks to store: a model whose blocks have the size a benchmark asks for, conversations, and their payloads."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from kvstore_client import Fingerprint, LayerGroup

MIB = 1 << 20
BLOCK_TOKENS = 64
LAYERS = 4
Bytes = npt.NDArray[np.uint8]


def model(block_bytes: int, name: str = "benchmark") -> Fingerprint:
    """A fingerprint whose blocks hold `block_bytes` of payload, a multiple of 256."""
    bytes_a_token = block_bytes // BLOCK_TOKENS // LAYERS
    return Fingerprint("benchmark", name, groups=(LayerGroup(0, "full", 0, tuple(range(LAYERS)), bytes_a_token),))


def tokens_of(conversation: int, blocks: int) -> npt.NDArray[np.int32]:
    """Token ids of a prefix of `blocks` blocks that no other conversation shares."""
    return np.arange(blocks * BLOCK_TOKENS, dtype=np.int32) + conversation * 1_000_000 % 2_000_000_000


def payloads(blocks: int, block_bytes: int) -> list[Bytes]:
    """Random bytes in memory that has been touched, so that reading them costs what reading costs."""
    every = np.random.default_rng(blocks).integers(0, 256, blocks * block_bytes, dtype=np.uint8)
    return list(every.reshape(blocks, block_bytes))


def shared_memory(nbytes: int) -> Bytes:
    """Shared memory that has been touched, as the slots of an arena are: pages of 4 KiB unless the system grants larger
    ones."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_SHARED), np.uint8)
    memory[:] = 1
    return memory
