"""A remote tier over a real Mooncake Store: the contract of tiers, and a node that hangs in the middle of a read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvstore_proto.arena import slot_bytes
from kvstore_tiers.base import OutcomeKind, Tier
from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.remote.store import RemoteStore
from kvstore_tiers.testing import TierContract
from kvstore_tiers.testing.transfers import block, get, put
from tests.reference.own_network import own_network
from tests.reference.remote_servers import MooncakeStore, mooncake_store, skip_without_mooncake
from tests.reference.running_daemon import eventually

pytestmark = pytest.mark.slow
MIB = 1 << 20
PAYLOAD_BYTES = 20_000


@pytest.fixture(autouse=True, scope="module")
def _network() -> Iterator[None]:
    skip_without_mooncake()
    with own_network():
        yield


def open_tier(url: str, capacity_bytes: int = 64 * MIB, timeout_s: float = 5.0) -> tuple[KeyedTier, RemoteStore]:
    store = RemoteStore(
        "remote", url, secret=bytes(range(32)), is_plain=lambda _digest: False, timeout_s=timeout_s,
        exchange_bytes=16 * MIB, credentials={},
    )  # fmt: skip
    return KeyedTier(store, capacity_bytes), store


class TestTierOverMooncake(TierContract):
    store: MooncakeStore

    @pytest.fixture(autouse=True)
    def _store(self, tmp_path: Path, _network: None) -> Iterator[None]:
        with mooncake_store(tmp_path) as self.store:
            yield

    def make_tier(self, capacity_bytes: int) -> Tier:
        return open_tier(self.store.url, capacity_bytes)[0]


def test_a_node_that_hangs_costs_the_worker_and_no_more(tmp_path: Path) -> None:
    with mooncake_store(tmp_path) as servers:
        tier, store = open_tier(servers.url, timeout_s=1.0)
        with closing(tier):
            header, payload = block(1, PAYLOAD_BYTES)
            slot = put(tier, header, payload)
            assert slot is not None
            servers.holder.freeze()
            outcome, _ = get(tier, slot, header.key, PAYLOAD_BYTES)
            assert outcome.kind is OutcomeKind.FAILED
            servers.holder.thaw()
            assert eventually(lambda: get(tier, slot, header.key, PAYLOAD_BYTES)[0].ok)
            outcome, copy = get(tier, slot, header.key, PAYLOAD_BYTES)
            assert outcome.ok and np.array_equal(copy, payload)
            assert store.restarts == 1
            assert slot.nbytes == slot_bytes(PAYLOAD_BYTES)
