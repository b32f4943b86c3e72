"""Requests to a daemon with very many blocks, against one with few: whether their time grows with the blocks.

Owns the rows `..._at_scale`. Both daemons run at once, and each turn asks both, now one first, now the other. The NVMe
tier of both is full to the last slot, and their slots are holes, so each put that must be durable evicts as many
blocks there as it brings, and writes to slots that have no space yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore_client import Session
from kvstore_proto.v1 import admin_pb2
from support.daemon import MIB, BenchDaemon, Bytes, payloads, tokens_of
from support.report import AT_MOST, Row, median, time_once
from support.scale_store import CHAIN_BLOCKS, FINGERPRINT, PROBES, SLOT_BYTES, Store

PASSED_PROBES = 50  # chains that other rows look up
TURNS = 70  # evicting twice as often must leave blocks of the few
assert TURNS <= PROBES - PASSED_PROBES
LIMIT = 1.2
_FIRST_PUT = 1000  # conversations that no probe is
_WARM_UP = 5
_SETTLE_S = 2.0  # a client that came first has its lookup index then


@dataclass
class _Asked:
    """A full daemon that is asked, and the next conversation that nobody has put yet."""

    store: Store
    daemon: BenchDaemon
    session: Session
    data: list[Bytes]
    conversation: int = _FIRST_PUT

    def look_up(self, turn: int) -> float:
        """Look up a chain that is on NVMe alone, which nobody has looked up before. Return the seconds."""
        keys = self.store.probes[PASSED_PROBES + turn]
        began = time.perf_counter()
        found = self.session.lookup(keys=keys)
        took_s = time.perf_counter() - began
        if found.blocks != CHAIN_BLOCKS:
            raise SystemExit(f"a chain of {CHAIN_BLOCKS} stored blocks: {found.blocks} found")
        return took_s

    def put(self, turn: int) -> float:
        """Put a chain into DRAM, where there is room. Return the seconds."""
        return time_once(lambda: self._put("none"))

    def evict(self, turn: int) -> float:
        """Put a chain that is durable when the put is answered. Return the seconds."""
        return time_once(lambda: self._put("always"))

    def evict_control(self, turn: int) -> float:
        """Put a durable chain. Return the seconds that the daemon's first thread, which evicts, has computed."""
        before_s = self.daemon.control_s()
        self._put("always")
        return self.daemon.control_s() - before_s

    def _put(self, durability: str) -> None:
        self.conversation += 1
        tokens = tokens_of(self.conversation, CHAIN_BLOCKS)
        receipt = self.session.put(tokens, payloads=self.data, durability=durability, wait="settled")
        wanted = "durable" if durability == "always" else "volatile"
        if receipt.stored_blocks != CHAIN_BLOCKS or set(receipt.durability) != {wanted}:
            raise SystemExit(
                f"a put of {CHAIN_BLOCKS} blocks: {receipt.statuses} {receipt.durability} {receipt.reason}"
            )

    def evicted_blocks(self) -> int:
        """Return how many blocks the NVMe tier has evicted."""
        tiers = self.daemon.admin("Tiers", admin_pb2.TiersRequest()).tiers
        return sum(tier.evicted_blocks for tier in tiers if tier.name == "nvme")


def rows_at_scale(large: Store, small: Store, turns: int) -> list[Row]:
    """Return the rows of requests to `large` against the same to `small`, by `turns` turns each, at most `TURNS`."""
    kinds: dict[str, Callable[[_Asked, int], float]] = {
        "lookup_64_at_scale": _Asked.look_up,  # first: what is evicted is not found
        "put_64_at_scale": _Asked.put,
        "evict_64_at_scale": _Asked.evict,
        "evict_64_control_at_scale": _Asked.evict_control,
    }
    rows = []
    with _asked(large) as one, _asked(small) as other:
        time.sleep(_SETTLE_S)
        for name, kind in kinds.items():
            of_large, of_small = _medians(one, other, kind, turns)
            rows.append(Row(name, of_large * 1e3, "ms", of_small * 1e3, f"at {small.blocks} blocks", AT_MOST, LIMIT))
        for each in (one, other):
            if each.evicted_blocks() < 2 * turns * CHAIN_BLOCKS:
                raise SystemExit(f"{each.evicted_blocks()} blocks evicted from NVMe: puts found free slots")
    return rows


@contextmanager
def _asked(store: Store) -> Iterator[_Asked]:
    """Yield a daemon whose NVMe tier is full, and a session."""
    data = payloads(CHAIN_BLOCKS, SLOT_BYTES - 4096)
    with store.served(store.full_bytes) as daemon, daemon.connect(FINGERPRINT, staging_bytes=4 * MIB) as session:
        yield _Asked(store, daemon, session, data)


def _medians(one: _Asked, other: _Asked, kind: Callable[[_Asked, int], float], turns: int) -> tuple[float, float]:
    """Return the median seconds of both, asked in turns, each first in half of them; the first turns do not count."""
    seconds: dict[int, list[float]] = {id(one): [], id(other): []}
    for turn in range(turns):
        for asked in (one, other) if turn % 2 else (other, one):
            seconds[id(asked)].append(kind(asked, turn))
    return median(seconds[id(one)][_WARM_UP:]), median(seconds[id(other)][_WARM_UP:])
