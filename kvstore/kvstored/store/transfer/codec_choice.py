"""The choice of a codec for each block of a tier whose setting is "auto", by break-even.

A get reads blocks one behind the other, and blocks are decoded, by several threads, while the next ones are read. So a
codec pays when reading fewer bytes and working on them, the slower of both for each block and the other once, takes
less time than reading the payload. The rate of the medium is measured by the reads. The work is the processor time of a
plain read, and of decoding, over the cores that decoding gets when it is measured, at the start and from time to time:
a core that other work takes makes a codec slower. Where whole reads of both forms were measured lately, they alone
decide. What a codec makes of a model's blocks only those can tell: one block of each size is a trial. The module
decides; `staging.py` does the work. Invariant: without a measured rate of the medium no codec is chosen for its gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvstore_tiers.codec_rates import CodecRates, SteadyRate
from kvstore_tiers.codecs import CODECS, Codec, codec_named

AUTO_CODECS = ("int8", "context", "lossless")  # as far as this build has them
WORTHWHILE = 1.04  # less gain is within what measuring misses
IDLE_SHARE = 3 / 4  # of the cores, while gets are answered
SIDE_BY_SIDE = 1.5  # runs at a time, from which a run was not alone
MEASURE_AGAIN_S, TRY_AGAIN_S = 10.0, 60.0


def auto_codecs() -> list[Codec]:
    """Return the codecs that "auto" chooses from, as far as they can be used here."""
    found = [codec_named(name) for name in AUTO_CODECS if name in CODECS]
    return [codec for codec in found if codec is not None and not codec.lacks()]


def read_s(blocks: float, reading_s: float, work_s: float = 0.0, alone_s: float = 0.0) -> float:
    """Return the seconds that a get of `blocks` takes, each of which occupies the medium for `reading_s`, all threads
    together for `work_s`, and one thread alone for `alone_s`."""
    return max(blocks * reading_s, reading_s + (blocks - 1) * work_s) + alone_s


def _core_s(bytes_per_s: float) -> float:
    """Return the seconds a byte of a core that does other work too; 0 where the rate is not known."""
    return 1 / bytes_per_s / IDLE_SHARE if bytes_per_s else 0.0


def _are_alike(first: SteadyRate, second: SteadyRate) -> bool:
    """Return whether about as many runs of `first` as of `second` were under way at a time: a block among many of
    another form waits for those."""
    few, many = sorted((first.runs_at_a_time, second.runs_at_a_time))
    return few * SIDE_BY_SIDE >= many


class CodecChoice:
    """Chooses among `codecs` by `rates`. `blocks_a_get()` returns how many blocks a request reads, on average.
    `measure(codec)` begins to measure a codec, and returns at once; `seconds()` is the time."""

    def __init__(
        self,
        codecs: Sequence[Codec],
        rates: CodecRates,
        blocks_a_get: Callable[[int], float],
        measure: Callable[[Codec], None],
        seconds: Callable[[], float],
    ) -> None:
        self._codecs, self._rates, self._blocks_a_get = codecs, rates, blocks_a_get
        self._measure, self._seconds = measure, seconds
        self._measured_s: dict[int, float] = {}
        self._tried_s: dict[tuple[int, int], float] = {}

    def choose(self, payload_bytes: int, *, takes_lossy: bool) -> Codec | None:
        """Return the codec with the largest gain for a payload, None if none is worthwhile."""
        self.measure_again()
        best, most = None, WORTHWHILE
        for codec in self._codecs:
            if codec.is_lossy and not takes_lossy:
                continue
            gain = self.gain(codec, payload_bytes)
            if gain >= most:
                best, most = codec, gain
        return best

    def choose_to_try(self, payload_bytes: int, *, takes_lossy: bool) -> Codec | None:
        """Return a codec that was not tried lately on a payload of this size, None if there is none: its ratio may be
        another than a made-up block has. Codecs whose rate is not measured yet are not tried."""
        now_s = self._seconds()
        for codec in self._codecs:
            tried_s = self._tried_s.get((codec.number, payload_bytes), -math.inf)
            if now_s - tried_s < TRY_AGAIN_S or (codec.is_lossy and not takes_lossy):
                continue
            if self._rates.decoding[codec.number].bytes_per_s:
                self._tried_s[codec.number, payload_bytes] = now_s
                return codec
        return None

    def gain(self, codec: Codec, payload_bytes: int) -> float:
        """Return how many times faster gets of such payloads are under `codec`; 0 while that is not known."""
        served = self._rates.served[codec.number], self._rates.served[0]
        coded, plain = (each.recent_bytes_per_s for each in served)
        if coded and plain and _are_alike(*served):
            return coded / plain
        medium, ratio = self._rates.medium.bytes_per_s, self._rates.ratio(codec.number)
        cores = self._cores(codec.number)
        if not medium or not cores or not payload_bytes:
            return 0.0
        blocks, reading_s = max(1.0, self._blocks_a_get(payload_bytes)), payload_bytes / medium
        plain_core_s = payload_bytes * _core_s(self._rates.read_core[0].bytes_per_s)
        measured, read = self._rates.decoding_core[codec.number], self._rates.read_core[codec.number]
        decoding_core_s = payload_bytes * _core_s(read.recent_bytes_per_s or measured.bytes_per_s)
        coded_core_s = plain_core_s / ratio + decoding_core_s  # fewer bytes are read and checked
        as_it_is = read_s(blocks, reading_s, plain_core_s / cores, plain_core_s)
        return as_it_is / read_s(blocks, reading_s / ratio, coded_core_s / cores, coded_core_s)

    def _cores(self, number: int) -> float:
        """Return how many cores threads got that decoded side by side; 0 while that is not known. Time for which they
        waited for something else than a core counts as one that they did not get."""
        one = self._rates.decoding_core[number].bytes_per_s
        return self._rates.decoding[number].bytes_per_s / one if one else 0.0

    def measure_again(self) -> None:
        """Begin to measure codecs whose last measurement is old."""
        now_s = self._seconds()
        for codec in self._codecs:
            if now_s - self._measured_s.get(codec.number, -math.inf) >= MEASURE_AGAIN_S:
                self._measured_s[codec.number] = now_s
                self._measure(codec)
