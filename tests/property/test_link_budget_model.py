"""The budget of copies on a link against a plain bucket: when each copy goes, and how much goes in any time."""

from __future__ import annotations

from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvstore_client.device.budget import LAPSE_S, SLICE_BYTES, LinkBudget
from tests.reference.stepped_time import SteppedTime

KIB = 1 << 10
Event = tuple[Literal["copy", "pause", "decoding", "idle"], int]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("copy"), st.integers(1, 3 * SLICE_BYTES // KIB).map(lambda count: count * KIB)),
        st.tuples(st.just("pause"), st.integers(1, 400)),  # ms
        st.tuples(st.sampled_from(["decoding", "idle"]), st.just(0)),
    ),
    max_size=40,
)


class Bucket:
    """Bytes that may go now: filled at the rate, up to a slice, also below nothing by one copy."""

    def __init__(self, rate: int, now_s: float) -> None:
        self.rate, self.level, self.at_s = rate, float(SLICE_BYTES), now_s
        self.decodes_until_s = now_s

    def pass_time(self, now_s: float) -> None:
        self.level = min(float(SLICE_BYTES), self.level + (now_s - self.at_s) * self.rate)
        self.at_s = now_s

    def copy(self, nbytes: int, now_s: float) -> tuple[bool, float]:
        """Return whether a copy counts, and when it goes."""
        self.pass_time(now_s)
        at_s = now_s + max(0.0, -self.level / self.rate)
        if at_s >= self.decodes_until_s:
            return False, max(now_s, self.decodes_until_s)
        self.pass_time(at_s)
        self.level -= nbytes
        return True, at_s


@given(EVENTS, st.integers(1 << 20, 1 << 34))
def test_copies_go_when_a_bucket_says(events: list[Event], rate: int) -> None:
    time = SteppedTime()
    budget, bucket = LinkBudget(rate, clock=time.clock, wait=time.wait), Bucket(rate, time.now_s)
    gone: list[tuple[float, int]] = []
    for what, number in events:
        if what == "pause":
            time.now_s += number / 1e3
        elif what != "copy":
            budget.decoding(what == "decoding")
            bucket.decodes_until_s = time.now_s + LAPSE_S if what == "decoding" else time.now_s
        else:
            counts, at_s = bucket.copy(number, time.now_s)
            assert budget.wait("stores", number) == counts
            assert time.now_s == pytest.approx(at_s, abs=1e-6)
            if counts:
                gone.append((time.now_s, number))
    for first, (begin_s, _) in enumerate(gone):
        total = 0
        for end_s, nbytes in gone[first:]:
            assert total <= rate * (end_s - begin_s) + SLICE_BYTES + max(size for _, size in gone) + KIB
            total += nbytes
