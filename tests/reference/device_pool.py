"""The pieces of a block of a pool on a device, one at a time."""

from __future__ import annotations

from typing import NamedTuple

from kvstore_client.device import DevicePool
from kvstore_client.device.pool import Pages


class Piece(NamedTuple):
    """`nbytes` of a payload from `offset` on, at `address` of the device."""

    address: int
    offset: int
    nbytes: int


def pieces(pool: DevicePool, layer: int, block: Pages) -> list[Piece]:
    (runs,) = pool.to_pages([pool.pages_of(block)], [0], range(layer, layer + 1))
    return [Piece(*run) for run in runs.rows()]
