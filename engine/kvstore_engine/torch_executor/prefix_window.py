"""Keeps the keys of the prefix that a step's sequences share in a device's L2 cache, while attention reads them.

The module owns the setting, and the window of each stream. It is off unless $KVENGINE_L2_PREFIX sets bytes of the cache
aside: its gain has not been measured. It never changes a result. Decode steps that were recorded keep the window that
they were recorded with: `choose` says which steps have equal windows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from itertools import pairwise
from typing import Protocol

import numpy as np

from kvstore_console.units import parse_size
from kvstore_engine.errors import UsageError
from kvstore_engine.kernels.base import Int32Array
from kvstore_engine.kernels.cuda.device import CacheWindow

VARIABLE = "KVENGINE_L2_PREFIX"
_log = logging.getLogger(__name__)
_NONE = np.zeros(0, np.int32)


class KeepsInCache(Protocol):
    """A device that can keep a range of its memory in its L2 cache; see `kernels.cuda.Device`."""

    @property
    def window_bytes(self) -> int: ...

    def set_aside_cache(self, nbytes: int) -> int: ...

    def keep_in_cache(self, window: CacheWindow | None, *, stream: int) -> None: ...


class PrefixWindow:
    """A chooser of the range of memory that `device` keeps in its L2 cache: the K blocks, of `block_bytes` bytes each,
    that most sequences of a step share. It is for one thread.
    """

    def __init__(self, device: KeepsInCache, block_bytes: int) -> None:
        self._device, self._block_bytes = device, block_bytes
        self._chosen: CacheWindow | None = None  # as if planes began at address 0
        self._streams: set[int] = set()  # that have a window

    @classmethod
    def wanted(cls, device: KeepsInCache, block_bytes: int) -> PrefixWindow | None:
        """Return a chooser of the memory that `device` keeps in its L2 cache. Return None unless the environment
        variable KVENGINE_L2_PREFIX reserves bytes of the cache for this and the device can do it. `block_bytes` are the
        bytes of a K block. Raises UsageError for a wrong size in the variable.
        """
        text = os.environ.get(VARIABLE, "")
        try:
            nbytes = parse_size(text or "0")
        except ValueError as error:
            raise UsageError(f"{VARIABLE}: {error}") from None
        if not nbytes:
            return None
        kept = device.set_aside_cache(nbytes) if device.window_bytes else 0
        if not kept:
            _log.warning("%s=%s has no effect: this device has no windows of its L2 cache", VARIABLE, text)
            return None
        return cls(device, block_bytes)

    def choose(self, tables: Iterable[Int32Array]) -> CacheWindow | None:
        """Choose the memory to keep for the next step, and return it as a window, with addresses counted from the start
        of a plane; None if no block is shared. `tables` has for each sequence the blocks that the step only reads.
        """
        shared = most_shared(tables)
        self._chosen = CacheWindow.of_blocks(0, self._block_bytes, shared, self._device.window_bytes)
        return self._chosen

    def place(self, plane: int, stream: int) -> None:
        """Let the device keep the memory that `choose` chose in its L2 cache for the next kernels on `stream`, which
        read the plane at the address `plane`. If nothing was chosen, an earlier choice is undone.
        """
        chosen = self._chosen
        if chosen is not None:
            self._device.keep_in_cache(CacheWindow(plane + chosen.address, chosen.nbytes), stream=stream)
            self._streams.add(stream)
        elif stream in self._streams:
            self._device.keep_in_cache(None, stream=stream)
            self._streams.discard(stream)


def most_shared(tables: Iterable[Int32Array]) -> Int32Array:
    """Return the leading blocks that some of the sequences have in common and whose sharing saves the most reads: (n -
    1) * m for n sequences and m blocks. `tables` has the block numbers of each sequence. The result is empty if nothing
    is shared.
    """
    order = sorted(tables, key=lambda table: table.tobytes())  # those with a common beginning are neighbours
    common = [_common(one, other) for one, other in pairwise(order)]
    # The greatest rectangle under `common`: neighbours i..j share min(common[i..j-1]) blocks.
    most, found = 0, _NONE
    rising: list[tuple[int, int]] = []  # where a height begins, and the height
    for at, height in enumerate([*common, 0]):
        begin = at
        while rising and rising[-1][1] >= height:
            begin, shared = rising.pop()
            if shared * (at - begin) > most:
                most, found = shared * (at - begin), order[begin][:shared]
        rising.append((begin, height))
    return found


def _common(one: Int32Array, other: Int32Array) -> int:
    """Return the number of leading blocks that both have."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
