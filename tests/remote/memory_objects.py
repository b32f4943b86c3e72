"""An object store that is a dictionary, with a clock of its own: what runs and their log need, for tests of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from kvstore_tiers.remote.drivers.runs.objects import Listed, Objects


class MemoryObjects(Objects):
    """`contents`: a test may change it at will. Each request lets other tasks run first. `requests` counts them."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.changed_at: dict[str, datetime] = {}
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.requests: list[str] = []

    def pass_time(self, time: timedelta) -> None:
        self.now += time

    def keys(self, folder: str) -> list[str]:
        return sorted(key for key in self.contents if key.startswith(f"{folder}/"))

    async def _asked(self, what: str) -> None:
        self.requests.append(what)
        await asyncio.sleep(0)

    async def list(self, folder: str, after: str = "") -> list[Listed]:
        await self._asked(f"list {folder}")
        return [Listed(key, self.changed_at[key]) for key in self.keys(folder) if key > after]

    async def get(self, key: str) -> bytes | None:
        await self._asked(f"get {key}")
        return self.contents.get(key)

    async def get_range(self, key: str, start: int, end: int) -> memoryview | None:
        await self._asked(f"get {key}")
        content = self.contents.get(key)
        return None if content is None else memoryview(content)[start:end]

    async def create(self, key: str, content: bytes) -> bool:
        await self._asked(f"create {key}")
        if key in self.contents:
            return False
        self.contents[key], self.changed_at[key] = content, self.now
        return True

    async def put(self, key: str, content: bytes) -> None:
        await self._asked(f"put {key}")
        self.contents[key], self.changed_at[key] = content, self.now

    async def delete(self, keys: Sequence[str]) -> None:
        await self._asked("delete")
        for key in keys:
            self.contents.pop(key, None)
