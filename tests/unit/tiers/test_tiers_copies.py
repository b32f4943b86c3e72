"""Copies of the host tier: a payload is hashed at its destination, and a batch waits for no thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvstore_proto.arena import payload_checksum
from kvstore_tiers.base import Outcome, OutcomeKind
from kvstore_tiers.segments import PIECE_BYTES, gather_and_checksum, segment_of
from kvstore_tiers.threads import TransferBatch

DONE = Outcome(OutcomeKind.DONE)


@pytest.mark.parametrize(
    "sizes",
    [
        [0], [1], [4096], [PIECE_BYTES], [PIECE_BYTES - 1], [PIECE_BYTES + 1], [3 * PIECE_BYTES + 17], [100, 0, 7],
        [PIECE_BYTES, 5, 2 * PIECE_BYTES + 5],
    ],
)  # fmt: skip
@pytest.mark.parametrize("left_out", [0, 3, 5000])
def test_a_gathered_payload_has_the_checksum_of_its_bytes(sizes: list[int], left_out: int) -> None:
    """`left_out` bytes at the end are copied, and are no part of the payload."""
    random = np.random.default_rng(1)
    parts = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    whole = np.concatenate(parts)
    payload_bytes = max(0, len(whole) - left_out)
    target = np.zeros(len(whole) + 1, np.uint8)

    checksum = gather_and_checksum(target.ctypes.data, [segment_of(part) for part in parts], payload_bytes)

    assert np.array_equal(target[:-1], whole) and target[-1] == 0, "nothing beyond the payload is written"
    assert checksum == payload_checksum(whole[:payload_bytes])


def test_a_thread_that_comes_late_holds_up_nothing() -> None:
    ran: list[int] = []
    ended: list[Sequence[Outcome]] = []

    def transfer(number: int) -> Outcome:
        ran.append(number)
        return Outcome(OutcomeKind.DONE, nbytes=number)

    batch = TransferBatch([lambda number=number: transfer(number) for number in range(5)], 2, ended.append)  # type: ignore[misc]
    batch.run()
    assert ran == [0, 1, 2, 3, 4], "the one that is there does all of it, in order"
    assert not ended, "the other may still be in a transfer, for all we know"
    batch.run()

    assert ran == [0, 1, 2, 3, 4], "nothing twice"
    assert [[outcome.nbytes for outcome in outcomes] for outcomes in ended] == [[0, 1, 2, 3, 4]], "once, in their order"


def test_a_transfer_taken_by_another_thread_in_the_middle_of_ours_is_left_to_it() -> None:
    ran: list[str] = []
    ended: list[Sequence[Outcome]] = []

    def first() -> Outcome:
        batch.run()  # stands for the second thread, which takes all the others meanwhile
        ran.append("first")
        return DONE

    def second() -> Outcome:
        ran.append("second")
        return DONE

    batch = TransferBatch([first, second], 2, ended.append)
    batch.run()

    assert ran == ["second", "first"]
    assert [len(outcomes) for outcomes in ended] == [2]
