"""A device that remembers which windows of its L2 cache it was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore_engine.kernels.cuda.device import CacheWindow

BLOCK = 1024


@dataclass
class AskedDevice:
    window_bytes: int = 64 * BLOCK
    most_kept: int = 16 * BLOCK
    kept: list[int] = field(default_factory=list)
    asked: list[tuple[CacheWindow | None, int]] = field(default_factory=list)

    def set_aside_cache(self, nbytes: int) -> int:
        self.kept.append(min(nbytes, self.most_kept))
        return self.kept[-1]

    def keep_in_cache(self, window: CacheWindow | None, *, stream: int) -> None:
        self.asked.append((window, stream))
