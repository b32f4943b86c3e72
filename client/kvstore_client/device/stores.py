"""Payloads on their way from pages of a pool to host memory: the copies of many are waited for at once.

Owns which are under way, and which parts of the buffer they have. Takes no lock and makes no context current: the
caller has done both.
Invariants: a part of the buffer is given out anew only once its bytes have been taken; a registration is given back
once, when the copies have ended; each payload knows then whether they went well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore_client.device.copies import CopyStream
from kvstore_client.device.pool import DevicePool, Pages
from kvstore_client.device.registered import RegisteredMemory, Registration
from kvstore_client.memory import Bytes
from kvstore_proto.cuda_copies import Run


@dataclass(slots=True, eq=False)
class Storing:
    """A payload on its way to `destination`: straight there (`taken`), or to `at` in the buffer. `error`: of its
    copies, once `is_over`."""

    destination: Bytes
    taken: Registration | None
    at: int
    is_over: bool = False
    error: BaseException | None = None


class Stores:
    """On `stream`; what is not registered goes by `buffer`, which holds a payload of any pool at least."""

    def __init__(self, stream: CopyStream, registered: RegisteredMemory, buffer: Bytes) -> None:
        self._stream, self._registered = stream, registered
        self._buffer = buffer
        self._under_way: list[Storing] = []

    def begin(self, pool: DevicePool, destination: Bytes, page: Pages, after: Sequence[int]) -> Storing:
        """Queue the copies of a page of `pool`, each layer's behind its event in `after`, all behind a single one, to a
        slot of staging memory or of an arena. Raises DeviceError."""
        whole = destination.base if isinstance(destination.base, np.ndarray) else destination
        address = destination.__array_interface__["data"][0]
        start = address - whole.__array_interface__["data"][0]
        taken = self._registered.take(whole, start, destination.nbytes)
        storing = Storing(destination, taken, self._room(destination.nbytes) if taken is None else 0)
        self._under_way.append(storing)
        to = address if taken is not None else self._buffer.__array_interface__["data"][0] + storing.at
        try:
            layers = range(len(pool.layers))
            groups = [range(layer, layer + 1) for layer in layers] if len(after) > 1 else [layers]
            for at, group in enumerate(groups):
                if at < len(after):
                    self._stream.wait(after[at])
                pieces = [piece for layer in group for piece in pool.pieces(layer, page)]
                self._stream.queue([Run(to + piece.offset, piece.address, piece.nbytes) for piece in pieces], "to host")
        except BaseException:
            self.settle()  # a part of it may be under way
            raise
        return storing

    def settle(self) -> None:
        """Wait for the copies of all that was begun."""
        settled, self._under_way = self._under_way, []
        if not settled:
            return
        error: BaseException | None = None
        try:
            self._stream.synchronize()
        except BaseException as raised:  # raised again where each of them is waited for
            error = raised
        for each in settled:
            if each.taken is not None:
                self._registered.give_back(each.taken)
            elif error is None:
                np.copyto(each.destination, self._buffer[each.at : each.at + each.destination.nbytes])
            each.is_over, each.error = True, error

    def _room(self, nbytes: int) -> int:
        """Where the buffer has room for a payload; waits for those that are there, where it has none."""
        used = sum(each.destination.nbytes for each in self._under_way if each.taken is None)
        if used + nbytes <= self._buffer.nbytes:
            return used
        self.settle()
        return 0
