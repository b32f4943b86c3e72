"""For any writes, kills, restarts and waits, the writes never exceed one day's budget plus what was earned."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstored.clock import NS_PER_S
from kvstored.store.endurance.budget import DAY_S, BurstBudget, ClockReading, SavedBudget, WriteVerdict
from tests.reference.examples import examples

RATES = st.sampled_from([1 << 20, 16 << 20, 1 << 30])


class Budget(RuleBasedStateMachine):
    """The medium is `saved`: what a kill leaves. Saving an allotment is two steps, so a kill comes between."""

    @initialize(rate=RATES)
    def start(self, rate: int) -> None:
        self.rate = rate
        self.now_ns = self.wall_ns = NS_PER_S
        self.boot = 0
        self.begun_ns = self.now_ns
        self.spent_bytes = 0
        self.lost_ns = 0  # time by which the wall clock may be wrong
        self.saved: SavedBudget | None = None
        self.allotting: SavedBudget | None = None
        self.budget = BurstBudget(rate, None, self.moment())

    def moment(self) -> ClockReading:
        return ClockReading(self.now_ns, self.wall_ns, f"boot {self.boot}")

    def come_back(self) -> None:
        self.allotting = None
        # A first start that never saved an allotment never spent a byte either.
        assert self.saved is not None or self.spent_bytes == 0
        self.budget = BurstBudget(self.rate, self.saved, self.moment())

    @rule(seconds=st.floats(0, 2 * DAY_S))
    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * NS_PER_S)
        self.wall_ns += round(seconds * NS_PER_S)

    @rule(share=st.floats(0, 1.2))
    def spend(self, share: float) -> None:
        nbytes = int(self.rate * share)
        if self.budget.spend(nbytes, self.now_ns) is WriteVerdict.GRANTED:
            self.spent_bytes += nbytes

    @rule(share=st.floats(0, 0.1))
    def spend_and_give_back(self, share: float) -> None:
        nbytes = int(self.rate * share)
        if self.budget.spend(nbytes, self.now_ns) is WriteVerdict.GRANTED:
            self.budget.give_back(nbytes)

    @precondition(lambda self: self.allotting is None)
    @rule(share=st.floats(0, 1.2))
    def allot(self, share: float) -> None:
        wanted = int(self.rate * share)
        if self.budget.wants_allotment(wanted, self.now_ns):
            self.allotting = self.budget.begin_allotment(wanted, self.moment())

    @precondition(lambda self: self.allotting is not None)
    @rule(well=st.booleans(), reached_medium=st.booleans())
    def end_allotment(self, well: bool, reached_medium: bool) -> None:
        if well or reached_medium:  # a save that failed may have replaced the file all the same
            self.saved = self.allotting
        self.budget.end_allotment(saved=well)
        self.allotting = None

    @rule(reached_medium=st.booleans())
    def kill(self, reached_medium: bool) -> None:
        if self.allotting is not None and reached_medium:
            self.saved = self.allotting
        self.come_back()

    @rule()
    def stop_and_start(self) -> None:
        self.saved = self.budget.close(self.moment())
        self.come_back()

    @rule(back_s=st.floats(0, DAY_S))
    def reboot_with_a_clock_set_back(self, back_s: float) -> None:
        self.boot += 1
        self.wall_ns = max(0, self.wall_ns - round(back_s * NS_PER_S))
        self.come_back()

    @invariant()
    def never_more_than_was_earned(self) -> None:
        if hasattr(self, "rate"):
            earned = self.rate + self.rate * (self.now_ns - self.begun_ns) / (DAY_S * NS_PER_S)
            assert self.spent_bytes <= earned + 64  # rounding of floats
            assert self.budget.left_bytes(self.now_ns) <= self.rate
            assert self.spent_bytes + self.budget.left_bytes(self.now_ns) <= earned + 64


Budget.TestCase.settings = settings(max_examples=examples(300), stateful_step_count=60)
TestBudget = Budget.TestCase
