"""Exact readers and writers beside others that accept lossy copies, over evictions, promotions, races and restarts."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore_proto.arena import HEADER_BYTES, read_header
from kvstore_tiers.codecs import TESTING_ENVIRONMENT
from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.testing.lossy_store import LossyStore
from kvstored.clients.tenants import TenantDirectory
from kvstored.clock import NS_PER_S, ManualClock
from kvstored.lifecycle import Cause
from kvstored.lifetime.recovery import recover_blocks
from kvstored.store.blocks.check import check
from kvstored.store.operations import Client
from kvstored.store.operations.durability import Durability, DurabilityMode
from kvstored.store.operations.records import GetRequest, GrantedRun, StoreStatus
from tests.reference.driven_store import DrivenStore, keys_of, payload_of
from tests.reference.examples import examples
from tests.reference.small_store import PAYLOAD_BYTES, SmallStore, small_store

SMALL = (
    "host.capacity=4MiB", "host.policy=lru", "nvme.capacity=3MiB", "nvme.policy=lru", "durability.batch_ms=1",
)  # fmt: skip
FAR = ("tier.far.capacity=2MiB", "tier.far.arena=1MiB", "tier.far.policy=lru")
FORMS = {
    "nvme": (*SMALL, "nvme.codec=rounding", "nvme.codec_staging=1MiB"),
    "far": (*SMALL, *FAR, "tier.far.codec=rounding", "tier.far.codec_staging=1MiB"),
}
FORMS["both"] = (*FORMS["nvme"], *FORMS["far"])
FORMS["nvme, then a store"] = FORMS["nvme"]
DIGEST = b"tenant".ljust(16, b"\0")
CHAINS = st.integers(1, 6)
CALLS = st.one_of(
    st.tuples(
        st.just("put"), CHAINS, st.integers(1, 12), st.booleans(),
        st.sampled_from([DurabilityMode.NONE, DurabilityMode.BATCH, DurabilityMode.ALWAYS]),
    ),
    st.tuples(st.just("get"), CHAINS, st.integers(1, 12), st.booleans()),
    st.tuples(st.just("hold"), CHAINS, st.integers(1, 12), st.booleans()),
    st.tuples(st.just("leave"), CHAINS, st.integers(1, 12)),
)  # fmt: skip
STEPS = st.lists(
    st.one_of(CALLS, st.tuples(st.just("together"), st.lists(CALLS, min_size=2, max_size=3)), st.just(("restart",))),
    max_size=24,
)

BEFORE = [  # what makes lossy copies, some of them the only ones
    ("put", 1, 12, False, DurabilityMode.ALWAYS), ("put", 2, 8, False, DurabilityMode.ALWAYS),
    ("put", 3, 4, True, DurabilityMode.ALWAYS), ("leave", 1, 12), ("leave", 2, 4), ("get", 2, 3, False),
]  # fmt: skip


def rounded(payload: np.ndarray) -> np.ndarray:
    given_back = payload.copy()
    given_back[0::2] = 0
    return given_back


class Model:
    """A store, an exact client and one that accepts lossy copies, and the leases that are held."""

    def __init__(self, small: SmallStore) -> None:
        self.small, self.driven = small, DrivenStore(small)
        number = small.residency.tenant(DIGEST.hex())
        small.residency.exactness.tenants.add(number)
        self.clients = {
            exact: replace(self.driven.new_client(1 + exact), tenant_id=number, exact=exact) for exact in (True, False)
        }
        self.held: list[tuple[Client, list[bytes], GrantedRun]] = []

    async def put(self, chain: int, blocks: int, exact: bool, mode: DurabilityMode) -> None:
        answers = await self.driven.put(keys_of(chain, blocks), mode, self.clients[exact])
        statuses = set(answers[-1].statuses)
        if exact and statuses <= {StoreStatus.STORED, StoreStatus.PRESENT} and not self.racing:
            for key, durability in zip(keys_of(chain, blocks), answers[-1].durability, strict=True):
                row = self.find(key)
                assert row >= 0 and self.small.residency.exactness.served_tiers(row)
                assert not self.small.residency.exactness.lossy_tiers(row)
                assert mode is not DurabilityMode.ALWAYS or durability != Durability.PENDING

    racing = False

    def find(self, key: bytes) -> int:
        return self.small.residency.find(self.clients[True].tenant_id, key)

    async def get(self, chain: int, blocks: int, exact: bool) -> None:
        client, keys = self.clients[exact], keys_of(chain, blocks)
        before = self.driven.operations.look_up.look_up(client, b"".join(keys))
        held = await self.driven.operations.get.acquire(client, GetRequest(b"".join(keys)))
        if held.run is not None:
            self.judge(keys, held.run, exact)
            self.driven.operations.get.release(client, [held.run.lease_id])
        if not self.racing:
            assert held.blocks == before.usable
            if exact and held.blocks < blocks:
                row = self.find(keys[held.blocks])
                assert (held.cause is Cause.LOSSY_ONLY) == (row >= 0) == (before.cause is Cause.LOSSY_ONLY)

    async def hold(self, chain: int, blocks: int, exact: bool) -> None:
        client, keys = self.clients[exact], keys_of(chain, blocks)
        held = await self.driven.operations.get.acquire(client, GetRequest(b"".join(keys)))
        if held.run is not None:
            self.held.append((client, keys, held.run))
        if len(self.held) > 2:
            self.let_go()

    def let_go(self) -> None:
        client, keys, run = self.held.pop(0)
        self.judge(keys, run, client.exact)
        self.driven.operations.get.release(client, [run.lease_id])

    def judge(self, keys: list[bytes], run: GrantedRun, exact: bool) -> None:
        for key, slot in zip(keys, run.slots, strict=False):
            image = self.small.store.host.view(slot)
            stored, payload = image[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES], payload_of(key)
            is_exact = np.array_equal(stored, payload)
            assert is_exact or not exact, "an exact reader has lossy bytes"
            assert is_exact or np.array_equal(stored, rounded(payload))
            self.says(image, is_exact)

    def says(self, image: np.ndarray, is_exact: bool) -> None:
        raw = bytearray(image[:HEADER_BYTES].tobytes())
        raw[6:8] = bytes(2)  # the block may be gone from the slot, which the lease keeps
        header = read_header(raw)
        assert not isinstance(header, str) and bool(header.error) != is_exact

    async def leave(self, chain: int, blocks: int) -> None:
        residency = self.small.residency
        for key in keys_of(chain, blocks):
            row = self.find(key)
            is_free = row >= 0 and not residency.being_filled(row) and row not in residency.pins
            if is_free and residency.has(row, residency.mapped) and len(residency.tier_mask(row)) > 1:
                self.small.leave_host(row)

    async def together(self, calls: list[tuple[Any, ...]]) -> None:
        self.racing = True
        await asyncio.gather(*(self.do(*call) for call in calls))
        self.racing = False
        await self.small.settle()

    def do(self, name: str, *arguments: Any) -> Coroutine[Any, Any, None]:
        return cast("Coroutine[Any, Any, None]", getattr(self, name)(*arguments))

    def agree(self) -> None:
        """Each copy in memory is what its row says."""
        residency, exactness = self.small.residency, self.small.residency.exactness
        assert check(residency) == []
        for chain in range(1, 10):
            for key in keys_of(chain, 12):
                row = self.find(key)
                assert row < 0 or not any(exactness.is_lossy(row, at) for at in self.small.store.keyed)
                if row >= 0 and residency.has(row, residency.mapped):
                    slot = residency.slot(row, residency.mapped)
                    stored = self.small.store.host.view(slot)[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]
                    assert np.array_equal(stored, payload_of(key)) != exactness.is_lossy(row, residency.mapped)


async def drive(directory: Path, chosen: tuple[str, ...], has_store: bool, steps: list[tuple[Any, ...]]) -> None:
    pieces: list[list[tuple[Any, ...]]] = [[]]
    for step in steps:
        pieces[-1].append(step)
        if step[0] == "restart":
            pieces.append([])
    tenants = cast("TenantDirectory", SimpleNamespace(fingerprint_number=lambda digest: 1))
    for number, piece in enumerate(pieces):
        clock = ManualClock((number + 1) * NS_PER_S)
        keyed = [KeyedTier(LossyStore(), 64 << 20)] if has_store else []
        async with small_store(directory, *chosen, clock=clock, keyed=keyed) as small:
            model = Model(small)
            recover_blocks(small.nvme, small.residency, tenants, clock)
            for step in (*BEFORE, *piece) if number == 0 else piece:
                if step[0] != "restart":
                    await model.do(*step)
                    model.agree()
            while model.held:
                model.let_go()
            await small.settle()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_exact_readers_never_see_lossy_bytes(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TESTING_ENVIRONMENT, "1")

    @settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(STEPS)
    def run(steps: list[tuple[Any, ...]]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(drive(Path(directory), FORMS[form], "store" in form, steps))

    run()
