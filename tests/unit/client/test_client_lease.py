"""A lease ends by its own clock before the daemon's does, renews from the moment of asking, is checked after use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvstore_client.errors import KVStoreError
from kvstore_client.keys import Chain, KeyChains
from kvstore_client.lease import MARGIN_SHARE, MAX_MARGIN_S, Lease, LeasedBlock
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.kv_layout import KVLayout
from kvstore_proto.token_ids import TokenIds

MODEL = Fingerprint("m", "w", groups=(LayerGroup(0, layers=(0, 1, 2, 3), bytes_per_token_per_layer=16, heads=2),))


@dataclass
class World:
    """A clock, and a daemon that is there or not and what it grants: implements `Grant`."""

    block_tokens = 64
    layer_count = 4
    layout = KVLayout(MODEL, MODEL.groups[0])
    name = "7"

    now: float = 100.0
    alive: bool = True
    grants_s: float | None = 10.0
    takes_s: float = 0.0  # how long an answer is on its way
    released: int = 0

    def clock(self) -> float:
        return self.now

    def is_alive(self) -> bool:
        return self.alive

    def renew(self) -> float | None:
        self.now += self.takes_s
        return self.grants_s

    def release(self) -> None:
        self.released += 1

    def chain(self, tokens: TokenIds) -> Chain:
        return KeyChains(Fingerprint("m", "w"), [b"r" * 16]).chain(tokens, None, 0)

    def lease(self, expires_in_s: float = 10.0, blocks: int = 2) -> Lease:
        arena = np.arange(3 * 8192, dtype=np.uint8)
        held = [LeasedBlock(arena, 8192 * i, 4096, 1, b"k" * 16) for i in range(blocks)]
        return Lease(held, self, expires_in_s=expires_in_s, clock=self.clock)


@pytest.mark.parametrize("expires_in_s", [0.2, 1.0, 10.0, 600.0])
def test_a_lease_ends_a_margin_before_the_daemon_ends_it(expires_in_s: float) -> None:
    world = World()
    lease = world.lease(expires_in_s)
    margin_s = min(expires_in_s * MARGIN_SHARE, MAX_MARGIN_S)
    world.now += expires_in_s - margin_s - 1e-6
    assert lease.valid
    world.now += 2e-6
    assert not lease.valid


def test_renewal_counts_from_before_the_question() -> None:
    world = World(takes_s=3.0)
    lease = world.lease(10.0)
    assert lease.renew()
    world.now += 10.0 - 3.0 - MAX_MARGIN_S - 1e-6
    assert lease.valid
    world.now += 1e-3
    assert not lease.valid
    assert not lease.renew()


def test_a_renewal_that_the_daemon_denies_fails() -> None:
    assert not World(grants_s=None).lease().renew()


def test_copies_made_after_the_end_do_not_count() -> None:
    world = World()
    lease = world.lease()
    destinations = [np.empty(4096, np.uint8), np.empty(4096, np.uint8)]
    assert lease.copy_into(destinations) == 2
    world.alive = False
    assert lease.copy_into(destinations) == 0


def test_copies_carry_the_right_blocks() -> None:
    lease = World().lease()
    destination = np.empty((2, 512), np.float32)
    assert lease.copy_into([destination], first_block=1) == 1
    assert destination.tobytes() == lease.payload(1).tobytes()


@pytest.mark.parametrize(
    ("destination", "said"),
    [
        (np.empty(4095, np.uint8), "4095 bytes, its block 4096"),
        (np.empty((4096, 2), np.uint8)[:, 0], "C-contiguous"),
        (np.frombuffer(bytes(4096), np.uint8), "writable"),
    ],
)
def test_destinations_that_do_not_fit_are_named(destination: np.ndarray, said: str) -> None:
    with pytest.raises(KVStoreError, match=said):
        World().lease().copy_into([destination])
    with pytest.raises(KVStoreError, match="3 destinations"):
        World().lease().copy_into([destination] * 3)


def test_layers_cut_a_payload_without_gaps() -> None:
    lease = World().lease()
    assert np.array_equal(np.concatenate([lease.layer(1, i) for i in range(4)]), lease.payload(1))
    with pytest.raises(KVStoreError, match="layer 4 of 4"):
        lease.layer(0, 4)


def test_an_empty_lease_is_falsy_never_valid_and_released_in_silence() -> None:
    with Lease(reason="deadline") as lease:
        assert not lease
        assert not lease.valid
        assert lease.tokens == 0
    world = World()
    with world.lease():
        pass
    assert world.released == 1
