"""The log of changes in an object store, which many nodes append to, and the index that it makes.

    log/<number, 20 digits>           one change; created under the condition that it does not exist
    checkpoints/<number, 20 digits>   all values after the change of that number

A change number n is appended by a node that has applied all before n: so changes have one order, equal on every
node, and of two writers of one name the second sees the first. A node that loses the race for a number reads the
new changes, decides anew and tries the next.

A node starts from the newest checkpoint it can read and applies what is behind it. One in `CHECKPOINT_EVERY` changes is
followed by a checkpoint, by the node that appended it. Then what no node needs goes: changes before the checkpoint
before, changes and checkpoints older than `KEEP_FOR`, runs that no change knows after `GARBAGE_AFTER`. Any number of
nodes may do so at once: a checkpoint's content follows from its number.
A damaged change or checkpoint is left out with a warning: its values are forgotten. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from kvstore_tiers.remote.drivers.runs.objects import Listed, Objects
from kvstore_tiers.remote.drivers.runs.values import DamagedChange, RunChange, Values

LOG, CHECKPOINTS, RUNS = "log", "checkpoints", "runs"
CHECKPOINT_EVERY: Final = 256
KEEP_FOR: Final = timedelta(minutes=10)
GARBAGE_AFTER: Final = timedelta(hours=1)
STALE_S: Final = 60.0  # no node appends to what it last read longer ago: less than KEEP_FOR
_AT_ONCE: Final = 16  # requests
_ATTEMPTS: Final = 64
_LOGGER = logging.getLogger(__name__)


def run_key(run_id: str) -> str:
    return f"{RUNS}/{run_id}"


def _key(folder: str, number: int) -> str:
    return f"{folder}/{number:020}"


def _number(listed: Listed) -> int:
    """Return an object's number; -1 for an object of another kind, which is ignored."""
    digits = listed.key.rpartition("/")[2]
    return int(digits) if len(digits) == 20 and digits.isascii() and digits.isdigit() else -1


class Log:
    """The log of changes to the values in an object store, which several nodes append to. `values` is the index (which
    value is where) after change number `last`. A node writes a checkpoint, a snapshot of the index, after every
    `checkpoint_every` changes.
    """

    def __init__(
        self, objects: Objects, *, checkpoint_every: int = CHECKPOINT_EVERY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.values = Values()
        self.last = 0
        self._objects = objects
        self._checkpoint_every = checkpoint_every
        self._clock = clock
        self._read_at: float | None = None  # start of the last reading of the log
        self._changing = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._tidying: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start to read the log in the background, so that the first call need not wait. If the reading fails, a later
        call reads the log.
        """
        self._read_in_background()

    async def refresh(self, max_age_s: float) -> None:
        """Read every change that was appended to the log more than `max_age_s` seconds before this call; newer ones may
        be read too. If the caller is cancelled, the reading goes on.
        """
        earliest = self._clock() - max_age_s
        while self._read_at is None or self._read_at < earliest:
            await asyncio.shield(self._read_in_background())

    def _read_in_background(self) -> asyncio.Task[None]:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._read_changes())
            self._reading.add_done_callback(_seen)
        return self._reading

    async def append(self, make: Callable[[], RunChange | None]) -> list[str] | None:
        """Append the change that `make` returns to the log. If another node appended a change first, that change is
        read and `make` is called again; it returns None to give up. Return the ids of the runs (objects with many
        values) that this change left without a value; None if nothing was appended. Raises OSError.
        """
        async with self._changing:
            for _ in range(_ATTEMPTS):
                if self._read_at is None or self._clock() - self._read_at > STALE_S:
                    await self._catch_up()
                change = make()
                if change is None:
                    return None
                number = self.last + 1
                if await self._objects.create(_key(LOG, number), change.pack()):
                    self.last = number
                    emptied = self.values.apply(change)
                    self._tidy_after(number)
                    return emptied
                await self._catch_up()
                if self.last < number:
                    raise OSError(f"the store has an object {_key(LOG, number)}, and does not list it")
        raise OSError(f"other nodes were quicker to write the index {_ATTEMPTS} times")

    async def tidied(self) -> None:
        """Wait until the clean-up of old changes has ended, if one is running. It begins after a checkpoint, a snapshot
        of the index, was written.
        """
        if self._tidying is not None:
            await self._tidying

    async def stop(self) -> None:
        running = [task for task in (self._reading, self._tidying) if task is not None and not task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # Reading

    async def _read_changes(self) -> None:
        async with self._changing:
            await self._catch_up()

    async def _catch_up(self) -> None:
        started = self._clock()
        if self._read_at is None:
            await self._load_checkpoint()
        listed = await self._objects.list(LOG, after=_key(LOG, self.last))
        numbers = sorted(number for number in map(_number, listed) if number > self.last)
        if numbers and numbers[0] > self.last + 1 and not await self._load_checkpoint():
            _LOGGER.warning("changes %d to %d of the index are missing", self.last + 1, numbers[0] - 1)
        numbers = [number for number in numbers if number > self.last]
        for start in range(0, len(numbers), _AT_ONCE):
            batch = numbers[start : start + _AT_ONCE]
            contents = await asyncio.gather(*(self._objects.get(_key(LOG, number)) for number in batch))
            for number, content in zip(batch, contents, strict=True):
                change = _unpacked(_key(LOG, number), content)
                if change is not None:
                    self.values.apply(change)
                self.last = number
        self._read_at = started

    async def _load_checkpoint(self) -> bool:
        """Load the newest whole checkpoint, if it is newer than the known state; return whether it was."""
        newest = sorted(map(_number, await self._objects.list(CHECKPOINTS)), reverse=True)
        for number in newest:
            if number <= self.last:
                break
            change = _unpacked(_key(CHECKPOINTS, number), await self._objects.get(_key(CHECKPOINTS, number)))
            if change is not None:
                self.values.replace(change)
                self.last = number
                return True
        return False

    # Checkpoints and garbage

    def _tidy_after(self, number: int) -> None:
        if number % self._checkpoint_every == 0 and (self._tidying is None or self._tidying.done()):
            self._tidying = asyncio.create_task(self._tidy(number, self.values.snapshot()))

    async def _tidy(self, number: int, snapshot: RunChange) -> None:
        try:
            content = await asyncio.to_thread(snapshot.pack)
            await self._objects.put(_key(CHECKPOINTS, number), content)
            await self._delete_old(number)
        except OSError as error:
            _LOGGER.warning("the index was not tidied: %s", error)

    async def _delete_old(self, number: int) -> None:
        checkpoints = sorted(await self._objects.list(CHECKPOINTS), key=_number)
        written = next((listed for listed in checkpoints if _number(listed) == number), None)
        before = [listed for listed in checkpoints if 0 <= _number(listed) < number]
        if written is None or not before:
            return
        now = written.changed_at
        kept = before[-1]
        old = [listed.key for listed in before[:-1] if listed.changed_at < now - KEEP_FOR]
        for listed in await self._objects.list(LOG):
            if 0 <= _number(listed) <= _number(kept) and listed.changed_at < now - KEEP_FOR:
                old.append(listed.key)
        for listed in await self._objects.list(RUNS):
            run_id = listed.key.rpartition("/")[2]
            if listed.changed_at < now - GARBAGE_AFTER and not self.values.holds_run(run_id):
                old.append(listed.key)
        if old:
            await self._objects.delete(old)


def _unpacked(key: str, content: bytes | None) -> RunChange | None:
    if content is None:
        _LOGGER.warning("%s of the index is gone: what it says is forgotten", key)
        return None
    try:
        return RunChange.unpack(content)
    except DamagedChange as damage:
        _LOGGER.warning("%s of the index is damaged (%s): what it says is forgotten", key, damage)
        return None


def _seen(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # else asyncio reports it when no caller waits any more
