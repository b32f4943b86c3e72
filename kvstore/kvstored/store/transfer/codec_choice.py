"""The choice of a codec for each block of a tier whose setting is "auto", by break-even.

A get reads blocks one behind the other, and blocks are decoded, by several threads, while the next ones are read. So a
codec pays when reading fewer bytes and decoding them, the slower of both for each block and the other once, takes less
time than reading the payload. The rates are measured: of the medium by the reads, of the codecs at the start, from time
to time, and by the blocks that pass, of all threads together. A core that other work takes makes a codec slower, and so
counts; where whole reads of both forms were measured lately, they alone decide. What a codec makes of a model's blocks
only those can tell: one block of each size is a trial. The module decides; `staging.py` does the work. Invariant:
without a measured rate of the medium no codec is chosen for its gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvstore_tiers.codec_rates import SIDE_BY_SIDE, CodecRates, SteadyRate
from kvstore_tiers.codecs import CODECS, Codec, codec_named

AUTO_CODECS = ("int8", "context", "lossless")  # as far as this build has them
WORTHWHILE = 1.04  # less gain is within what measuring misses
IDLE_SHARE = 2 / 3  # of the cores for decoding, while gets read, copy and check
MEASURE_AGAIN_S, TRY_AGAIN_S = 10.0, 60.0


def auto_codecs() -> list[Codec]:
    """Return the codecs that "auto" chooses from, as far as they can be used here."""
    found = [codec_named(name) for name in AUTO_CODECS if name in CODECS]
    return [codec for codec in found if codec is not None and not codec.lacks()]


def read_s(
    blocks: float, block_bytes: int, ratio: float, medium: float, decoding: float = math.inf, alone: float = 0.0
) -> float:
    """Return the seconds that a get of `blocks` takes from a medium of `medium` bytes a second, of payloads that are
    stored `ratio` times smaller and decoded at `decoding` bytes a second by all threads, at `alone` by each of them."""
    reading_s, decoding_s, one_s = (
        block_bytes / ratio / medium,
        block_bytes / decoding,
        block_bytes / (alone or decoding),
    )
    return max(blocks * reading_s, reading_s + (blocks - 1) * decoding_s) + one_s


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
        together, alone = self._decoding(codec.number)
        if not medium or not together or not payload_bytes:
            return 0.0
        blocks = max(1.0, self._blocks_a_get(payload_bytes))
        as_it_is = blocks * payload_bytes / medium
        return as_it_is / read_s(blocks, payload_bytes, ratio, medium, together, alone)

    def _decoding(self, number: int) -> tuple[float, float]:
        """Return the bytes a second at which reads decode the codec `number`: on all threads, and on each."""
        known, read = self._rates.decoding[number], self._rates.decoding_of_reads[number]
        together, alone = known.bytes_per_s * IDLE_SHARE, known.bytes_per_s_alone * IDLE_SHARE
        if alone and read.recent_bytes_per_s:  # a measurement decodes the same bytes again, and does nothing else
            slower = min(1.0, read.bytes_per_s_alone / known.bytes_per_s_alone)
            return together * slower, alone * slower
        return together, alone

    def measure_again(self) -> None:
        """Begin to measure codecs whose last measurement is old."""
        now_s = self._seconds()
        for codec in self._codecs:
            if now_s - self._measured_s.get(codec.number, -math.inf) >= MEASURE_AGAIN_S:
                self._measured_s[codec.number] = now_s
                self._measure(codec)
