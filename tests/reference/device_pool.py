"""The pieces of a page of a pool on a device, one at a time."""

from __future__ import annotations

from typing import NamedTuple

from kvstore_client.device import DevicePool


class Piece(NamedTuple):
    """`nbytes` of a payload from `offset` on, at `address` of the device."""

    address: int
    offset: int
    nbytes: int


def pieces(pool: DevicePool, layer: int, page: int) -> list[Piece]:
    (runs,) = pool.to_pages([page], [0], range(layer, layer + 1))
    return [Piece(*run) for run in runs.rows()]
