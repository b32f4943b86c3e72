"""Writes values to runs and reads them, with several requests at once.

Neighbours are read by one request. A value is copied to its memory as it arrives, and never after the call has ended. A
run is at most `RUN_BYTES` long, unless one value is longer: it is written by one request without parts, several are
written and read at once, and its bytes are freed early when its values leave.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_tiers.remote.drivers.runs.log import run_key
from kvstore_tiers.remote.drivers.runs.objects import Objects
from kvstore_tiers.remote.drivers.runs.values import RUN_ID_BYTES, AddedRun, ValuePlace, rows_of

RUN_BYTES: Final = 8 << 20
SPAN_BYTES: Final = RUN_BYTES  # of a request, where values are shorter
GAP_BYTES: Final = 64 << 10  # rather read than asked around
REQUESTS_AT_ONCE: Final = 8
_LOGGER = logging.getLogger(__name__)


class WantedValue(NamedTuple):
    """A value to read from an object store: its `place` in a run (an object with many values), and the `memory` to read
    it into.
    """

    place: ValuePlace
    memory: memoryview


class ByteSpan(NamedTuple):
    run_id: str
    start: int
    end: int
    values: list[WantedValue]


def spans_of(wanted: Sequence[WantedValue], span_bytes: int = SPAN_BYTES) -> list[ByteSpan]:
    """Return ranges of bytes of runs (objects with many values) that together have all values of `wanted`, to read each
    range with one request. A range has up to about `span_bytes` bytes, more if one value is longer. No value is split.
    """
    spans: list[ByteSpan] = []
    for each in sorted(wanted, key=lambda each: each.place):
        run_id, start, length = each.place
        last = spans[-1] if spans else None
        is_near = last is not None and last.run_id == run_id and start <= last.end + GAP_BYTES
        if last is not None and is_near and max(last.end, start + length) - last.start <= span_bytes:
            last.values.append(each)
            spans[-1] = last._replace(end=max(last.end, start + length))
        else:
            spans.append(ByteSpan(run_id, start, start + length, [each]))
    return spans


async def read_runs(objects: Objects, wanted: Sequence[WantedValue]) -> set[str]:
    """Read the values `wanted` from the store into their memories. Return the ids of the runs (objects with many
    values) that the store has lost, or that are too short. The memories of values in these runs are undefined.
    """
    gone: set[str] = set()

    async def read(span: ByteSpan) -> None:
        content = await objects.get_range(run_key(span.run_id), span.start, span.end)
        if content is None or len(content) < span.end - span.start:
            if content is not None:
                _LOGGER.warning("run %s is shorter than the index says: its values are forgotten", span.run_id)
            gone.add(span.run_id)
            return
        for place, memory in span.values:
            at = place.offset - span.start
            np.copyto(_bytes_of(memory[: place.length]), _bytes_of(content[at : at + place.length]))

    await _all(read(span) for span in spans_of(wanted, objects.span_bytes))
    return gone


async def write_runs(objects: Objects, values: Sequence[tuple[bytes, memoryview]]) -> list[AddedRun]:
    """Store `values`, pairs of name and bytes, in this order in new runs (objects with many values), and return those
    runs. The values are not in the index until a change adds the runs.
    """
    groups: list[list[tuple[bytes, memoryview]]] = []
    room = 0
    for name, memory in values:
        if len(memory) > room:
            groups.append([])
            room = RUN_BYTES
        groups[-1].append((name, memory))
        room -= len(memory)
    added = [
        AddedRun(
            secrets.token_hex(RUN_ID_BYTES),
            rows_of([name for name, _ in group], [len(memory) for _, memory in group]),
        )
        for group in groups
    ]

    async def write(run: AddedRun, group: list[tuple[bytes, memoryview]]) -> None:
        await objects.put(run_key(run.run_id), b"".join(memory for _, memory in group))

    await _all(write(run, group) for run, group in zip(added, groups, strict=True))
    return added


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run some of the works at once. If one fails or this is cancelled, none runs on."""
    gate = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def gated(work: Coroutine[Any, Any, None]) -> None:
        async with gate:
            await work

    pending = list(works)
    tasks = [asyncio.ensure_future(gated(work)) for work in pending]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for work in pending:
            work.close()  # one that never began


def _bytes_of(memory: memoryview) -> npt.NDArray[np.uint8]:
    """Return the memory as an array, which numpy copies without the GIL."""
    return np.frombuffer(memory, np.uint8)
