"""Batches of writes to the host tier: a small one is there at once, a large one comes from a copy thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import pytest

from kvstore_proto.arena import slot_bytes
from kvstore_tiers import failpoints
from kvstore_tiers.base import Outcome, OutcomeKind
from kvstore_tiers.host import HostTier
from kvstore_tiers.host_transfers import AT_ONCE_BYTES
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing.transfers import block, get, image_run

PATIENCE_S = 30.0


def write(tier: HostTier, payload_bytes: int, blocks: int) -> tuple[list[Outcome], threading.Thread | None, bool]:
    """The outcomes, the thread that handed them over, and whether that was before the call returned."""
    writes, handed, ended = [], [], threading.Event()
    for number in range(blocks):
        header, payload = block(number, payload_bytes)
        slot = tier.allocate(slot_bytes(payload_bytes))
        assert slot is not None
        writes.append((slot, header, segment_of(payload)))

    def done(outcomes: Sequence[Outcome]) -> None:
        handed.append((list(outcomes), threading.current_thread()))
        ended.set()

    tier.write_many(image_run(writes), done)
    at_once = ended.is_set()
    assert ended.wait(PATIENCE_S) and len(handed) == 1
    for (slot, header, segment), outcome in zip(writes, handed[0][0], strict=True):
        if outcome.ok:
            read, copy = get(tier, slot, header.key, payload_bytes)
            assert read.ok and np.array_equal(copy, segment.owner)
    return (*handed[0], at_once)


def test_a_small_batch_is_written_before_the_call_returns() -> None:
    with closing(HostTier(16 << 20, arena_bytes=4 << 20)) as tier:
        outcomes, thread, at_once = write(tier, AT_ONCE_BYTES // 4, 4)
        assert at_once and thread is threading.current_thread() and all(outcome.ok for outcome in outcomes)


def test_a_larger_one_is_written_by_a_copy_thread() -> None:
    with closing(HostTier(16 << 20, arena_bytes=4 << 20)) as tier:
        outcomes, thread, _ = write(tier, AT_ONCE_BYTES // 4 + 1, 4)
        assert thread is not threading.current_thread() and all(outcome.ok for outcome in outcomes)


def test_what_may_wait_is_left_to_a_copy_thread() -> None:
    with closing(HostTier(16 << 20, arena_bytes=4 << 20)) as tier:
        failpoints.arm("host.before-copy=delay:0")
        try:
            _, thread, _ = write(tier, 4096, 1)
        finally:
            failpoints.disarm()
        assert thread is not threading.current_thread()


@pytest.mark.parametrize("payload_bytes", [4096, AT_ONCE_BYTES + 4096])
def test_a_batch_that_breaks_at_its_end_says_so_and_the_next_one_is_written(
    payload_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(HostTier(16 << 20, arena_bytes=4 << 20, copy_threads=1)) as tier:
        with monkeypatch.context() as patched:
            patched.setattr(tier._transfers._counters, "wrote_all", lambda *_: 1 // 0)
            outcomes, _, _ = write(tier, payload_bytes, 3)
        assert [(outcome.kind, outcome.message[:17]) for outcome in outcomes] == [
            (OutcomeKind.FAILED, "ZeroDivisionError")
        ] * 3
        assert all(outcome.ok for outcome in write(tier, payload_bytes, 3)[0])


@pytest.mark.parametrize("payload_bytes", [4096, AT_ONCE_BYTES + 4096])
def test_a_closed_tier_writes_nothing(payload_bytes: int) -> None:
    tier = HostTier(16 << 20, arena_bytes=4 << 20)
    header, payload = block(1, payload_bytes)
    slot = tier.allocate(slot_bytes(payload_bytes))
    assert slot is not None
    segment = tier.slot_segment(slot)
    handed: list[Sequence[Outcome]] = []
    tier._transfers.close()
    tier.write_many(image_run([(slot, header, segment_of(payload))]), handed.append)
    assert [[outcome.kind for outcome in outcomes] for outcomes in handed] == [[OutcomeKind.CANCELLED]]
    assert segment.nbytes == slot.nbytes
    tier.close()
