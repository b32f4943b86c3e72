"""Values in an object store: S3, GCS, Azure, or a directory.

    s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=R&allow_http=true
    gs://BUCKET/PREFIX    az://CONTAINER/PREFIX?account_name=A    file:///DIRECTORY

`credentials` and further options have obstore's names (`access_key_id`, `secret_access_key`, `session_token`, …); what
is not given is taken from the environment as obstore does. `index_age_s` (default 2) is this driver's own.

    PREFIX/runs/<id>           values of one write, one behind the other, about 8 MiB; never changed
    PREFIX/log/<number>        where they are, and what was dropped (runs/log.py).
    PREFIX/checkpoints/<n>     all of that up to change n.

A write costs one request for each 8 MiB and one for the change, a read one for each stretch of a run, `sizes` one
listing at most in `index_age_s`. A change that another node made less than `index_age_s` ago may be unknown to `sizes`,
and a new value to `read`; what `remove` removed no client reads from then on, as its bytes are gone. `write` and
`remove` are exact at any age, as the log is. Where the object of a run is gone (a lifecycle rule), its values are.
One thread of this driver runs an event loop that makes all requests; it ends with `close`.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from kvstore_tiers.remote.driver import Driver, Placed, WriteResult
from kvstore_tiers.remote.drivers.bucket import Bucket, split_options
from kvstore_tiers.remote.drivers.runs.log import Log, run_key
from kvstore_tiers.remote.drivers.runs.objects import Objects
from kvstore_tiers.remote.drivers.runs.reading import WantedValue, read_runs, write_runs
from kvstore_tiers.remote.drivers.runs.values import AddedRun, DropPlan, RunChange

INDEX_AGE_S: Final = 2.0
LARGEST_VALUE_BYTES: Final = 1 << 30
_MOVED_BYTES: Final = 256 << 20  # of values that one removal moves at once
T = TypeVar("T")


def open_driver(url: str, *, timeout_s: float, threads: int, credentials: Mapping[str, str]) -> Driver:
    options = split_options(url)
    age = options.pop("index_age_s", str(INDEX_AGE_S))
    try:
        index_age_s = float(age)
    except ValueError:
        raise ValueError(f"index_age_s={age}: give seconds, as index_age_s=2") from None
    if not 0 <= index_age_s <= 3600:
        raise ValueError(f"index_age_s={age}: give 0 to 3600 seconds")
    bucket = Bucket(url, options, credentials, timeout_s=timeout_s)
    return ObjectStoreDriver(bucket, timeout_s=timeout_s, index_age_s=index_age_s)


class ObjectStoreDriver(Driver):
    largest_value_bytes = LARGEST_VALUE_BYTES
    evicts = False

    def __init__(self, objects: Objects, *, timeout_s: float, index_age_s: float) -> None:
        self._objects = objects
        self._timeout_s = timeout_s
        self._index_age_s = index_age_s
        self._log = Log(objects)
        self._old_runs: set[str] = set()  # to be deleted: the next removal does what one that failed left undone
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="object-store", daemon=True)
        self._thread.start()
        self._loop.call_soon_threadsafe(self._log.begin)

    def sizes(self, names: Sequence[str]) -> list[int]:
        return self._call(self._sizes(_keys(names))) if names else []

    def read(self, wanted: Sequence[Placed]) -> list[int]:
        return self._call(self._read(wanted)) if wanted else []

    def write(self, values: Sequence[Placed]) -> list[WriteResult]:
        return self._call(self._write(values)) if values else []

    def remove(self, names: Sequence[str]) -> None:
        if names:
            self._call(self._drop(_keys(names), is_final=True))

    def evict(self, names: Sequence[str]) -> None:
        if names:
            self._call(self._drop(_keys(names), is_final=False))

    def probe(self) -> None:
        self._call(self._log.refresh(0))

    def close(self) -> None:
        with self._closing:
            if self._loop.is_closed():
                return
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        await self._log.stop()
        await self._loop.shutdown_default_executor()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise OSError(errno.EBADF, "the driver is closed")
        return asyncio.run_coroutine_threadsafe(self._timed(work), self._loop).result()

    async def _timed(self, work: Coroutine[Any, Any, T]) -> T:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await work
        except TimeoutError as error:
            if limit.expired():
                raise TimeoutError(errno.ETIMEDOUT, f"no answer in {self._timeout_s:g} s") from None
            raise error

    async def _sizes(self, names: Sequence[bytes]) -> list[int]:
        await self._log.refresh(self._index_age_s)
        places = map(self._log.values.find, names)
        return [place.length if place else 0 for place in places]

    async def _read(self, wanted: Sequence[Placed]) -> list[int]:
        names = _keys([placed.name for placed in wanted])
        values = self._log.values
        if not all(name in values for name in names):
            await self._log.refresh(self._index_age_s)
        sizes = [0] * len(names)
        missing: Sequence[int] = range(len(names))
        for _ in range(2):  # what moved to another run since the index was read is found at its new place
            found: list[tuple[int, WantedValue]] = []
            for at in missing:
                place, memory = values.find(names[at]), wanted[at].memory
                sizes[at] = place.length if place else 0
                if place and place.length <= len(memory):
                    found.append((at, WantedValue(place, memory)))
            gone = await read_runs(self._objects, [each for _, each in found])
            missing = [at for at, each in found if each.place.run_id in gone]
            if not missing:
                return sizes
            await self._log.refresh(0)
            for run_id in gone:
                values.forget_run(run_id)
        for at in missing:
            sizes[at] = 0
        return sizes

    async def _write(self, values: Sequence[Placed]) -> list[WriteResult]:
        await self._log.refresh(self._index_age_s)
        known = self._log.values
        new: dict[bytes, tuple[int, memoryview]] = {}
        names = _keys([value.name for value in values])
        for at, (name, placed) in enumerate(zip(names, values, strict=True)):
            if len(placed.memory) > LARGEST_VALUE_BYTES:
                raise ValueError(f"a value of {len(placed.memory)} bytes: at most {LARGEST_VALUE_BYTES}")
            if name not in known:
                new.setdefault(name, (at, placed.memory))
        answers = [WriteResult.EXISTS] * len(values)
        if not new:
            return answers
        added: list[AddedRun] = []

        def change() -> RunChange | None:
            places = [(name, known.find(name)) for name in new]
            if any(place is not None and place.run_id in own for _, place in places):
                return None  # this change is appended, though its answer was lost
            free = {name for name, place in places if place is None}
            for run in added:
                run.rows["live"] = [name in free for name in run.rows["name"].tolist()]
            return RunChange((), added) if free else None

        try:
            added += await write_runs(self._objects, [(name, memory) for name, (_, memory) in new.items()])
            own = {run.run_id for run in added}
            await self._log.append(change)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return [WriteResult.NO_ROOM if name in new else WriteResult.EXISTS for name in names]
        for name, (at, _) in new.items():
            place = known.find(name)
            if place is not None and place.run_id in own:
                answers[at] = WriteResult.STORED
        await self._delete(own)
        return answers

    async def _drop(self, names: Sequence[bytes], *, is_final: bool) -> None:
        await self._log.refresh(0 if is_final else self._index_age_s)

        def plan() -> DropPlan | None:
            return self._log.values.plan_drop(names, is_final=is_final, most_bytes=_MOVED_BYTES)

        old = self._old_runs
        while (planned := plan()) is not None:
            added = await self._moved(planned)
            old.update(planned.rewritten, (run.run_id for run in added))

            def change(planned: DropPlan = planned, added: list[AddedRun] = added) -> RunChange | None:
                if plan() != planned:
                    return None
                return RunChange([*planned.dropped, *(name for name, _ in planned.moved)], added)

            old.update(await self._log.append(change) or ())
        await self._delete(old)
        old.clear()

    async def _delete(self, run_ids: Iterable[str]) -> None:
        """Delete the runs that hold no value."""
        unused = [run_key(run_id) for run_id in run_ids if not self._log.values.holds_run(run_id)]
        if unused:
            await self._objects.delete(unused)

    async def _moved(self, planned: DropPlan) -> list[AddedRun]:
        """Return the values that stay, in new runs; values whose bytes are gone are left out."""
        kept = [(name, WantedValue(place, memoryview(bytearray(place.length)))) for name, place in planned.moved]
        lost = await read_runs(self._objects, [wanted for _, wanted in kept])
        return await write_runs(
            self._objects, [(name, wanted.memory) for name, wanted in kept if wanted.place.run_id not in lost]
        )


def _keys(names: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(name) for name in names]
