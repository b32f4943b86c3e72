"""What a cache did for the sequence it holds, for people and for tests. Never decides anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheReport:
    """A snapshot. `reason` says why no more was restored, `store_reason` why no more is stored; empty if all is well.

    `lookup_s` was spent on asking, `restore_s` on copying; `waiting_blocks` are full and not yet stored.
    """

    restored_tokens: int = 0
    computed_tokens: int = 0
    restored_bytes: int = 0
    lookup_s: float = 0.0
    restore_s: float = 0.0
    reason: str = ""
    stored_blocks: int = 0
    present_blocks: int = 0
    waiting_blocks: int = 0
    store_reason: str = ""
