"""A codec whose work is measured, for the choice of a codec by break-even, and blocks to measure it with."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from kvstore_proto.arena import BlockHeader
from kvstore_proto.number_types import NUMBER_TYPES
from kvstore_tiers.codec_rates import FEWEST_RUNS, CodecRates
from kvstore_tiers.codecs import Codec, CodingError, Encoded
from kvstore_tiers.codecs.shapes import K, PayloadShape, Tensor, V
from kvstore_tiers.segments import AlignedBuffer, Bytes, buffer_at

log = logging.getLogger(__name__)
ROUNDS, PATIENCE_S = 8, 10.0
_LAYERS, _TOKENS, _HEADS, _WIDTH = 16, 64, 4, 64  # so large that the work on numbers counts, not the calls
_one_by_one = threading.Lock()


class Measured(Codec):
    """Does what `codec` does, and notes in `rates` how long encoding takes. Decoding is measured by who reads."""

    def __init__(self, codec: Codec, rates: CodecRates) -> None:
        self._codec, self._rates = codec, rates
        self.name, self.number = codec.name, codec.number
        self.is_lossy, self.most_error = codec.is_lossy, codec.most_error

    def lacks(self) -> str:
        return self._codec.lacks()

    def bound(self, payload_bytes: int) -> int:
        return self._codec.bound(payload_bytes)

    def encode(
        self, header: BlockHeader, shape: PayloadShape | None, payload: memoryview, target: memoryview
    ) -> Encoded:
        with self._rates.encoding[self.number].work(len(payload)):
            return self._codec.encode(header, shape, payload, target)

    def decode(self, stored: memoryview, payload: memoryview) -> None:
        self._codec.decode(stored, payload)

    def decode_and_hash(self, stored: memoryview, payload: memoryview) -> int:
        return self._codec.decode_and_hash(stored, payload)

    def error(self, stored: memoryview) -> CodingError | None:
        return self._codec.error(stored)

    def measure(self) -> None:
        """Encode a made-up block of K and V some times, and decode it on as many threads as read it, one for a core at
        most. It takes some tens of milliseconds."""
        shape, payload = _made_up()
        header = BlockHeader(bytes(16), bytes(16), bytes(32), bytes(16), payload.nbytes)
        room = AlignedBuffer(self.bound(payload.nbytes))
        target = memoryview(buffer_at(room.address, room.nbytes)).cast("B")
        for _ in range(FEWEST_RUNS):
            encoded = self.encode(header, shape, payload.data, target)
            if not encoded.nbytes:
                return
        self._rates.guess_ratio(self.number, payload.nbytes, encoded.nbytes)

        together, core = self._rates.decoding[self.number], self._rates.decoding_core[self.number]
        threads = min(self._rates.threads, len(os.sched_getaffinity(0)))
        all_there = threading.Barrier(threads)

        def decode(number: int) -> None:
            back = np.ones_like(payload)  # touched: a read fills memory that was used before
            all_there.wait(PATIENCE_S)
            for _ in range(ROUNDS):
                with together.work(payload.nbytes):
                    began = core.begin()
                    self.decode_and_hash(target[: encoded.nbytes], back.data)  # as a read does
                    core.end(began, payload.nbytes)

        with ThreadPoolExecutor(threads, f"measure-{self.name}") as side_by_side:
            list(side_by_side.map(decode, range(threads)))


def measure_beside(codec: Codec) -> None:
    """Begin to measure `codec` on a thread of its own, after the codecs that are being measured; return at once."""
    assert isinstance(codec, Measured)

    def measure() -> None:
        from kvstore_tiers.codecs.native import wait_for_library  # a daemon without codecs needs no compiler

        wait_for_library()  # what a codec does without compiled code says little
        try:
            with _one_by_one:
                codec.measure()
        except Exception as error:  # of a library, perhaps: the codec is not chosen
            log.warning("codec %s cannot be measured: %s", codec.name, error)

    threading.Thread(target=measure, name="codec-measure", daemon=True).start()


@cache
def _made_up() -> tuple[PayloadShape, Bytes]:
    """Return a block of K and V in f16, whose numbers are spread as a model's numbers are."""
    kind, row_bytes = NUMBER_TYPES["f16"], _HEADS * _WIDTH * 2
    tensors = tuple(
        Tensor(part, kind, at * _TOKENS * row_bytes, _TOKENS, _HEADS, _WIDTH, row_bytes, _WIDTH * 2)
        for at, part in enumerate((K, V))
    )
    chosen = np.random.default_rng(1)
    numbers = chosen.standard_normal((_LAYERS, 2 * _TOKENS, _HEADS * _WIDTH), np.float32)
    payload = numbers.astype(np.float16).view(np.uint8).reshape(-1)
    return PayloadShape(_LAYERS, 2 * _TOKENS * row_bytes, tensors), payload
