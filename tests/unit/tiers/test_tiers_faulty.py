"""The faulty wrapper does what its plan says and nothing else."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvstore_tiers.base import Outcome, OutcomeKind
from kvstore_tiers.testing.faulty import Fault, FaultyTier
from kvstore_tiers.testing.memory import MemoryTier
from kvstore_tiers.testing.transfers import block, finish, get
from tests.reference.stored_blocks import stored_slot

HEADER, PAYLOAD = block(1, 5000)


@pytest.fixture
def tier() -> Iterator[FaultyTier]:
    with closing(FaultyTier(MemoryTier(1 << 20))) as tier:
        yield tier


def test_reads_fail_from_the_second_to_the_third(tier: FaultyTier) -> None:
    slot = stored_slot(tier, HEADER, PAYLOAD)
    tier.plan(Fault("read", "fail", at=2, until=3, errno=errno.EREMOTEIO))
    outcomes = [get(tier, slot, HEADER.key, 5000)[0] for _ in range(4)]
    assert [outcome.ok for outcome in outcomes] == [True, False, False, True]
    assert outcomes[1].errno == errno.EREMOTEIO


def test_corrupt_refuse_and_failed_sync(tier: FaultyTier) -> None:
    slot = stored_slot(tier, HEADER, PAYLOAD)
    tier.plan(Fault("read", "corrupt"), Fault("allocate", "refuse", until=1), Fault("sync", "fail"))
    assert get(tier, slot, HEADER.key, 5000)[0].kind is OutcomeKind.CORRUPT
    assert tier.allocate(8192) is None
    assert tier.allocate(8192) is not None
    assert finish(tier.sync).kind is OutcomeKind.FAILED


def test_a_delayed_transfer_ends_as_it_would_have(tier: FaultyTier) -> None:
    tier.plan(Fault("write", "delay", delay_s=0.01))
    slot = stored_slot(tier, HEADER, PAYLOAD)
    assert get(tier, slot, HEADER.key, 5000)[0].ok


def test_a_hanging_transfer_ends_at_close() -> None:
    tier = FaultyTier(MemoryTier(1 << 20), [Fault("read", "hang")])
    slot = stored_slot(tier, HEADER, PAYLOAD)
    ended: list[Outcome] = []
    tier.read(slot, HEADER.key, [], ended.append)
    assert ended == []
    tier.close()
    assert [outcome.kind for outcome in ended] == [OutcomeKind.CANCELLED]
