"""One part of a job: chunks from the store into rows of vLLM's CPU tier, or the reverse. One memcpy each way.

Owns the order lease, copy, check. Invariants: no byte is read outside a lease; a chunk counts as loaded only if the
lease still held *after* it was copied; a miss, a full store and an absent daemon are outcomes, not errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from kvstore_client.memory import Bytes
from kvstore_client.receipt import PRESENT, STORED, PutReceipt
from kvstore_client.results import REASON_NO_DAEMON, UNKNOWN_TIER, Lookup
from kvstore_connectors.vllm_tier.chunks import KeySource, Run, names
from kvstore_proto.identity import BlockKeys

LOADED = "loaded"
KEPT = frozenset({STORED, PRESENT})


class HeldBlocks(Protocol):
    """The part of a lease that is used."""

    reason: str

    @property
    def valid(self) -> bool: ...
    def __len__(self) -> int: ...
    def payload(self, block: int) -> Bytes: ...


class TierSession(KeySource, Protocol):
    """The part of a session that moves chunks."""

    def probe(self, tokens: Any = None, *, keys: Any = None, group: int | None = None) -> Lookup: ...
    def lookup(
        self, tokens: Any = None, *, keys: Any = None, group: int | None = None, deadline_s: float | None = None
    ) -> Lookup: ...
    def get(
        self, tokens: Any = None, *, keys: Any = None, group: int | None = None, deadline_s: float | None = None
    ) -> AbstractContextManager[HeldBlocks]: ...
    def put(
        self,
        tokens: Any = None,
        *,
        payloads: Sequence[Any],
        keys: Any = None,
        first_block: int = 0,
        group: int | None = None,
        payload_bytes: int | None = None,
        deadline_s: float = 5.0,
    ) -> PutReceipt: ...


def present(session: TierSession, keys: BlockKeys, group: int, deadline_s: float) -> list[bool]:
    """Whether each chunk is stored: by the index in shared memory, and by the daemon where that is not certain."""
    found = session.probe(keys=keys, group=group)
    if UNKNOWN_TIER in found.tiers:
        found = session.lookup(keys=keys, group=group, deadline_s=deadline_s)
    tiers = found.tiers
    return [place < len(tiers) and tiers[place] not in ("absent", UNKNOWN_TIER) for place in range(len(keys))]


def load(
    session: TierSession,
    run: Run,
    memory: Bytes,
    deadline_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """The outcome of each chunk: "loaded", or why it is not in its row, which then holds nothing of use.

    `memory`: uint8[rows, row_bytes]. A gap ends the run: vLLM computes from there on.
    """
    outcomes = ["missing"] * len(run)
    keys = names(session, run.keys, run.group, run.adapter)
    if keys is None:
        return [REASON_NO_DAEMON] * len(run)
    with session.get(keys=keys, group=run.group, deadline_s=deadline_s) as lease:
        count = len(lease)
        for block, row in enumerate(run.rows[:count]):
            payload = lease.payload(block)
            if len(payload) != memory.shape[1]:
                count = block
                break
            np.copyto(memory[row], payload)
        is_valid = lease.valid  # asked after the copy
        outcomes[:count] = [LOADED if is_valid else "lease_ended"] * count
        outcomes[count:] = [lease.reason or "missing"] * (len(run) - count)
    return outcomes


def store(session: TierSession, run: Run, memory: Bytes, deadline_s: float) -> list[str]:
    """The status of each chunk in the store's words: "stored", "present", "declined", "no_room", "failed", …

    A chunk whose predecessor is not stored begins a chain of its own.
    """
    chain = run.keys if run.before is None else (run.before, *run.keys)
    keys = names(session, chain, run.group, run.adapter)
    if keys is None:
        return [REASON_NO_DAEMON] * len(run)
    if run.before is not None and present(session, keys[:1], run.group, deadline_s) != [True]:
        keys = keys[1:]
    receipt = session.put(
        keys=keys,
        first_block=len(keys) - len(run),
        payloads=[memory[row] for row in run.rows],
        group=run.group,
        payload_bytes=memory.shape[1],
        deadline_s=deadline_s,
    )
    return list(receipt.statuses)
