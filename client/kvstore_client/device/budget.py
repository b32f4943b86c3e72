"""A limit on the share of an engine's copies of the link to its device while the engine decodes: decode comes first.

Stores keep to a rate, since no request waits for them; loads, whose requests wait for a first token, only if they have
one. Without a decode step nothing is limited, nor are copies that a step waits for (`lifted`). The module owns the
rates, the observed speed, and the spent bytes. It copies nothing, and knows neither blocks nor streams. Invariants: a
store that waits here holds no lock of copies, and a load only the lock of its own stream and buffer; while the engine
decodes, copies of a flow take no more in any time than its rate allows, plus SLICE_BYTES and the last copy.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from kvstore_client.link_rate import AUTO, Rate

Flow = Literal["stores", "loads"]
SLICE_BYTES = 4 << 20  # are copied at once, or one larger block; a fraction of a millisecond of a link
AUTO_SHARE = 0.25  # of the link, as the daemon's copies keep to; a choice, not a measurement
ASSUMED_BYTES_S = 1e9  # of the link, before FIRST_SEEN_BYTES were seen to move
FIRST_SEEN_BYTES, MEMORY_BYTES = 16 << 20, 256 << 20  # older ones count less and less
LEAST_SEEN_BYTES = 256 << 10  # fewer say more of a call's latency than of the link
LAPSE_S = 1.0  # an engine that says no more that it decodes has stopped


@dataclass(slots=True)
class _Pace:
    """The state of one flow. `free_at_s`: the time until which begun copies are paid for. `lifts`: the number of steps
    that wait for this flow.
    """

    rate: Rate
    free_at_s: float = -math.inf
    lifts: int = 0


class LinkBudget:
    """A limit on the bytes a second that an engine copies to and from one device while it decodes. `stores` is the rate
    of copies from the device, `loads` of copies to it: bytes a second, AUTO for a quarter of the link's observed
    speed, or None for no limit. It may be used from any thread.
    """

    def __init__(
        self,
        stores: Rate = AUTO,
        loads: Rate = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Condition, float], object] = threading.Condition.wait,
    ) -> None:
        self._clock, self._wait = clock, wait
        self._changed = threading.Condition()  # of all that follows
        self._paces: dict[Flow, _Pace] = {"stores": _Pace(stores), "loads": _Pace(loads)}
        self._decodes_until_s = -math.inf
        self._seen_bytes, self._seen_s = 0.0, 0.0
        self._is_closed = False
        self.waits: Counter[Flow] = Counter()  # how often copies had to

    def decoding(self, is_decoding: bool) -> None:
        """Note, before each step of the engine, whether the step computes next tokens of running answers. True holds
        until the next call, for at most LAPSE_S seconds; only meanwhile are copies limited.
        """
        with self._changed:
            self._decodes_until_s = self._clock() + LAPSE_S if is_decoding else -math.inf
            if not is_decoding:
                self._changed.notify_all()

    def limits(self, flow: Flow) -> bool:
        """Return whether a rate limits copies of `flow` ("stores" or "loads") now, so that a copy may have to wait."""
        with self._changed:
            return self._rate(self._paces[flow]) is not None

    def wait(self, flow: Flow, nbytes: int) -> bool:
        """Wait until the rate of `flow` ("stores" or "loads") allows another copy, then count `nbytes` as spent and
        return True. Return False at once, without counting, if no rate limits the flow now. The caller must hold no
        lock that a copy of the other flow needs.
        """
        pace, has_waited = self._paces[flow], False
        with self._changed:
            while (rate := self._rate(pace)) is not None:
                now_s = self._clock()
                if now_s >= pace.free_at_s:
                    pace.free_at_s = max(pace.free_at_s, now_s - SLICE_BYTES / rate) + nbytes / rate
                    return True
                self.waits[flow] += not has_waited
                has_waited = True
                self._wait(self._changed, min(pace.free_at_s, self._decodes_until_s) - now_s)
        return False

    @contextlib.contextmanager
    def lifted(self, flow: Flow) -> Iterator[None]:
        """Let copies of `flow` ("stores" or "loads") run without a limit inside the `with` block, because a step of the
        engine waits for them.
        """
        pace = self._paces[flow]
        with self._changed:
            pace.lifts += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                pace.lifts -= 1

    def seen(self, nbytes: int, seconds: float) -> None:
        """Note that copies between host and device moved `nbytes` in `seconds`, without waiting in between. The
        observed speed of the link is computed from such notes.
        """
        if nbytes < LEAST_SEEN_BYTES or seconds <= 0:
            return
        with self._changed:
            self._seen_bytes += nbytes
            self._seen_s += seconds
            keep = min(1.0, MEMORY_BYTES / self._seen_bytes)
            self._seen_bytes, self._seen_s = keep * self._seen_bytes, keep * self._seen_s

    @property
    def link_bytes_s(self) -> float:
        """The observed speed of copies between host and device, in bytes a second. It is 1e9 until enough bytes have
        moved.
        """
        with self._changed:
            return self._link_bytes_s()

    def close(self) -> None:
        """End all limits, and let the threads in `wait` go on. A second call does nothing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _rate(self, pace: _Pace) -> float | None:
        """Return the bytes a second to keep to now; None: no limit."""
        if self._is_closed or pace.lifts or pace.rate is None or self._clock() >= self._decodes_until_s:
            return None
        return AUTO_SHARE * self._link_bytes_s() if pace.rate == AUTO else float(pace.rate)

    def _link_bytes_s(self) -> float:
        return self._seen_bytes / self._seen_s if self._seen_bytes >= FIRST_SEEN_BYTES else ASSUMED_BYTES_S
