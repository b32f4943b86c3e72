"""Where the payloads of leased blocks are that a load copies: on the device, in registered host memory, or elsewhere.

Owns the registrations that it has taken, until `give_back`. Takes no lock and makes no context current. Never copies.
Invariant: host memory counts as registered only while its registration is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore_client.device.registered import REGISTER_BYTES, RegisteredMemory, Registration
from kvstore_client.lease import LeasedBlock
from kvstore_client.memory import Bytes
from kvstore_cuda.copies import Numbers
from kvstore_proto.arena import HEADER_BYTES

_Payload = tuple[tuple[int, ...], int]  # its pages, its address


@dataclass(frozen=True, slots=True, eq=False)
class Payloads:
    """`addresses`, and for each the pages that it is for, in ascending order: uint64[n, pages of a block]."""

    pages: Numbers
    addresses: Numbers

    def __getitem__(self, chosen: slice) -> Payloads:
        return Payloads(self.pages[chosen], self.addresses[chosen])


class Sources:
    """Of blocks with their pages. Their get has seen that the payloads are inside of their memory."""

    def __init__(self, blocks: Sequence[tuple[LeasedBlock, tuple[int, ...]]], registered: RegisteredMemory) -> None:
        self._registered = registered
        self._taken: list[Registration] = []
        on_device: list[_Payload] = []
        on_host: list[_Payload] = []
        elsewhere: list[_Payload] = []
        known: dict[tuple[int, int], tuple[int, int]] = {}  # by arena and part: one look for all blocks there
        for block, pages in sorted(blocks, key=lambda block: block[1]):
            start = block.offset + HEADER_BYTES
            if block.chunk is not None:
                on_device.append((pages, block.chunk.address + start))
                continue
            part = id(block.arena), start // REGISTER_BYTES
            begin, end = known.get(part) or known.setdefault(part, self._take(block.arena, start))
            address = begin + start
            (on_host if address + block.payload_bytes <= end else elsewhere).append((pages, address))
        self.on_device, self.on_host, self.elsewhere = map(_payloads, (on_device, on_host, elsewhere))

    def _take(self, arena: Bytes, start: int) -> tuple[int, int]:
        """The address of an arena, and the end of what is registered there from `start` on; 0: nothing is."""
        begin = int(arena.__array_interface__["data"][0])
        taken = self._registered.take(arena, start, 1)
        if taken is None:
            return begin, 0
        self._taken.append(taken)
        return begin, taken.address + taken.memory.nbytes

    def give_back(self) -> None:
        """The copies have ended."""
        for taken in self._taken:
            self._registered.give_back(taken)


def _payloads(found: Sequence[_Payload]) -> Payloads:
    return Payloads(
        np.array([pages for pages, _ in found], np.uint64), np.array([address for _, address in found], np.uint64)
    )
