"""Arenas to write into: a slot's pages are entered before its first write, no page beyond it, and once."""

from __future__ import annotations

import ctypes
import os

from kvstore_client.arenas import WritableArenas
from kvstore_client.handshake import GrantedArena
from kvstore_client.memory import EnteredPages

PIECE = EnteredPages.PIECE_BYTES
ARENA, SIZE_BYTES = 7, 16 * PIECE
PUNCH_HOLE = 0x02 | 0x01  # and keep the size


class OneArena:
    """Hands out descriptors of one arena, as the daemon does."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("arena")
        os.ftruncate(self.descriptor, SIZE_BYTES)

    def request_arena(self, arena_id: int, timeout_s: float, *, writable: bool = False) -> GrantedArena:
        assert (arena_id, writable) == (ARENA, True)
        return GrantedArena(arena_id, SIZE_BYTES, os.dup(self.descriptor))

    @property
    def present_bytes(self) -> int:
        return os.fstat(self.descriptor).st_blocks * 512

    def empty(self) -> None:
        libc = ctypes.CDLL(None)
        assert libc.fallocate(self.descriptor, PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(SIZE_BYTES)) == 0


def test_the_pages_of_slots_are_entered_once_and_no_others() -> None:
    daemon = OneArena()
    arenas = WritableArenas(daemon, [], is_offered=True)
    assert arenas.arena(ARENA, 1.0) is not None
    slot = 2 * PIECE + 4096
    arenas.enter(ARENA, [4096, 6 * PIECE], slot)
    assert daemon.present_bytes == 2 * slot
    daemon.empty()
    arenas.enter(ARENA, [6 * PIECE, 4096], slot)
    assert daemon.present_bytes == 0
    arenas.enter(ARENA, [12 * PIECE], slot)
    assert daemon.present_bytes == slot
    os.close(daemon.descriptor)
