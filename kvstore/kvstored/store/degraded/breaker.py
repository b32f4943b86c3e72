"""The circuit breaker of a tier below DRAM: judges how its transfers end, sheds it, and probes before it serves again.

Closed, everything is passed on. It opens for writes when they fail in a row or the medium is read-only, and for
everything when reads fail in a row or a transfer hangs: then nothing is read there, so no engine waits for it. While it
is open it asks the tier to `probe` itself (write, sync, read back and compare scratch bytes), each time after twice the
pause before, up to `last_probe_s`. A probe that ends well half-opens it: work flows again, but the first failure of a
kind that was in doubt opens it at once. If it opens again within that time the pauses go on where they were: a
medium on which probes go well and writes do not is tried once in that time, not once a second.

Never touches a block and never retries a transfer. Lives on the control thread; completions are reported to it there.
Invariants: one probe at a time; while it is open for reads nothing is read; a mode changes only here, for its tier.
"""

from __future__ import annotations

import errno

from kvstore_tiers.base import ERRORS_IN_A_ROW, NO_ROOM, Outcome, OutcomeKind, Tier, TierState
from kvstored.clock import NS_PER_S, Clock
from kvstored.completions import CompletionQueue
from kvstored.store.degraded.modes import DegradedModes, Mode
from kvstored.telemetry import Counters

SYNC_ERRORS_IN_A_ROW = 3
STALL_S = 5.0  # a transfer that takes longer hangs; the slowest disks take a tenth of it
FIRST_PROBE_S, LAST_PROBE_S = 1.0, 60.0
LATE_TICK_S = 1.0  # a look that comes later than this says that we stood still, not the disk
CHECK_S = 10.0  # between two looks at whether the directory is still there
_IN_DOUBT = {  # by mode, what has yet to go well when a probe has; a full medium was never in doubt
    Mode.READ_ONLY: ("write", "sync"),
    Mode.SLOW: ("read", "write", "sync"),
    Mode.FAILED: ("read", "write", "sync"),
}


class TierBreaker:
    """The circuit breaker of `tier`: it stops reads or writes there while they fail or hang, and then probes the tier
    until it works again. `part` is the tier's name in messages. `last_probe_s` is the longest pause between two probes;
    it is short for a tier on another machine, which may be back at any moment."""

    def __init__(
        self,
        tier: Tier,
        part: str,
        modes: DegradedModes,
        completions: CompletionQueue,
        clock: Clock,
        counters: Counters,
        last_probe_s: float = LAST_PROBE_S,
    ) -> None:
        self._last_probe_s = last_probe_s
        self._tier = tier
        self._part = part
        self._modes = modes
        self._completions = completions
        self._clock = clock
        self._counters = counters
        self._failed_in_a_row = {"read": 0, "write": 0, "sync": 0}
        self._trial: set[str] = set()  # half open: kinds of which the first failure opens it again
        self._ok_since_ns: int | None = None  # None: from the start
        self._in_flight: dict[int, int] = {}  # number -> since when; oldest first
        self._started = 0
        self._probing = False
        self._probe_at_ns = 0
        self._ticked_ns = clock.monotonic_ns()
        self._probe_pause_s = FIRST_PROBE_S

    @property
    def mode(self) -> Mode:
        return self._modes.mode(self._part)

    @property
    def takes_writes(self) -> bool:
        mode = self.mode
        return mode is Mode.OK or (mode is Mode.FULL and self._failed_in_a_row["write"] < ERRORS_IN_A_ROW)

    @property
    def serves_reads(self) -> bool:
        return self.mode in (Mode.OK, Mode.FULL, Mode.READ_ONLY)

    def stalled_us(self) -> int:
        """Return for how many microseconds the oldest transfer in flight has been under way; 0 when none is."""
        return (self._clock.monotonic_ns() - self._oldest_ns()) // 1000

    # How transfers end

    def began(self) -> int:
        """Note that a transfer (read, write or sync) is handed to the tier. Return the number of the transfer, which
        `ended` needs."""
        self._started += 1
        self._in_flight[self._started] = self._clock.monotonic_ns()
        return self._started

    def ended(self, number: int, what: str, outcome: Outcome) -> None:
        """Note the `outcome` of the transfer `number`; `what` is its kind: "read", "write" or "sync"."""
        self._in_flight.pop(number, None)
        if outcome.ok:
            self._failed_in_a_row[what] = 0
            self._trial.discard(what)
            if what == "write" and self.mode is Mode.FULL and self._tier.statistics().state is TierState.OK:
                self._recover()
        elif outcome.kind is OutcomeKind.FAILED and outcome.errno != errno.EBUSY:  # another's value, not the medium
            self._failed(what, outcome)
            self._follow_tier()  # not after each that went well: a report of many slabs takes tens of microseconds

    def forgo(self, number: int) -> None:
        """Note that the transfer `number` has ended, without judging its outcome: it only shows that the medium does
        not hang."""
        self._in_flight.pop(number, None)

    def _failed(self, what: str, outcome: Outcome) -> None:
        self._failed_in_a_row[what] += 1
        limit = 1 if what in self._trial else SYNC_ERRORS_IN_A_ROW if what == "sync" else ERRORS_IN_A_ROW
        enough = self._failed_in_a_row[what] >= limit
        if what != "read" and outcome.errno in NO_ROOM:
            self._worsen(Mode.FULL, f"no room on the medium ({outcome.message})")
        elif what == "read" and enough:
            self._worsen(Mode.FAILED, f"reads fail ({outcome.message})")
        elif what != "read" and (enough or outcome.errno == errno.EROFS):
            self._worsen(Mode.READ_ONLY, f"{what}s fail ({outcome.message})")

    def _follow_tier(self) -> None:
        """Count the tier's own failures: it sees some that are not transfers of the daemon."""
        state = self._tier.statistics().state
        if state is not TierState.OK and not self._probing:
            mode_of = {TierState.FULL: Mode.FULL, TierState.READ_ONLY: Mode.READ_ONLY, TierState.FAILED: Mode.FAILED}
            mode = mode_of.get(state)
            if mode is not None:
                self._worsen(mode, self._tier.statistics().message or "the tier says so")

    def _worsen(self, mode: Mode, reason: str) -> None:
        order = (Mode.OK, Mode.FULL, Mode.READ_ONLY, Mode.SLOW, Mode.FAILED)
        if order.index(mode) <= order.index(self.mode):
            return
        now_ns = self._clock.monotonic_ns()
        if self.mode is Mode.OK:
            was_sound = self._ok_since_ns is None or now_ns - self._ok_since_ns > self._last_probe_s * NS_PER_S
            self._probe_pause_s = FIRST_PROBE_S if was_sound else min(self._last_probe_s, 2 * self._probe_pause_s)
        self._trial.clear()
        self._probe_at_ns = now_ns + round(self._probe_pause_s * NS_PER_S)
        self._modes.enter(self._part, mode, reason)  # what waits for the tier ends now

    # Time

    def tick(self) -> None:
        """Notice transfers that hang, and probe the tier when it is time. Call it a few times a second."""
        now_ns = self._clock.monotonic_ns()
        late_ns, self._ticked_ns = now_ns - self._ticked_ns, now_ns
        if late_ns > LATE_TICK_S * NS_PER_S:
            self._in_flight = {number: at_ns + late_ns for number, at_ns in self._in_flight.items()}
        if now_ns - self._oldest_ns() > STALL_S * NS_PER_S:
            self._worsen(Mode.SLOW, f"a transfer has not ended in {STALL_S:.0f} s")
        self._follow_tier()
        if now_ns >= self._probe_at_ns and not self._probing:
            self._probe()

    def _probe(self) -> None:
        """Probe the tier: thoroughly while the breaker is open, otherwise only whether the tier's place is still
        there.
        """
        mode = self.mode
        self._probing = True
        thorough = mode is not Mode.OK
        if thorough:
            self._counters.add("tier_probes")
        self._tier.probe(self._completions.to_loop(lambda outcome: self._probed(thorough, outcome)), thorough=thorough)

    def _probed(self, thorough: bool, outcome: Outcome) -> None:
        self._probing = False
        now_ns = self._clock.monotonic_ns()
        if not thorough:
            self._probe_at_ns = now_ns + round(CHECK_S * NS_PER_S)
            if outcome.kind is OutcomeKind.FAILED:
                self._worsen(Mode.READ_ONLY, outcome.message)
            return
        hangs = now_ns - self._oldest_ns() > STALL_S * NS_PER_S
        if outcome.ok and not hangs:
            self._failed_in_a_row = dict.fromkeys(self._failed_in_a_row, 0)
            self._trial = set(_IN_DOUBT.get(self.mode, ()))
            self._probe_at_ns = now_ns + round(CHECK_S * NS_PER_S)
            if self.mode is not Mode.FULL or self._tier.statistics().state is TierState.OK:
                self._recover()
            return
        if outcome.kind is OutcomeKind.FAILED:
            self._counters.add("tier_probe_failures")
        self._probe_pause_s = min(self._last_probe_s, 2 * self._probe_pause_s)
        self._probe_at_ns = now_ns + round(self._probe_pause_s * NS_PER_S)

    def _recover(self) -> None:
        self._ok_since_ns = self._clock.monotonic_ns()
        self._modes.enter(self._part, Mode.OK, "")

    def _oldest_ns(self) -> int:
        return next(iter(self._in_flight.values()), self._clock.monotonic_ns())
