"""Values out of runs: neighbours by one request, several requests at once, each value to its memory as it arrives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore_tiers.remote.drivers.runs.log import run_key
from kvstore_tiers.remote.drivers.runs.objects import Objects
from kvstore_tiers.remote.drivers.runs.values import Place

SPAN_BYTES: Final = 8 << 20  # of a request, where values are shorter
GAP_BYTES: Final = 64 << 10  # rather read than asked around
REQUESTS_AT_ONCE: Final = 8
_LOGGER = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """`memory` has room for the value."""

    place: Place
    memory: memoryview


class Span(NamedTuple):
    run_id: str
    start: int
    end: int
    values: list[Wanted]


def spans_of(wanted: Sequence[Wanted]) -> list[Span]:
    """Stretches of runs that hold these values, whole values each."""
    spans: list[Span] = []
    for each in sorted(wanted, key=lambda each: each.place):
        run_id, start, length = each.place
        last = spans[-1] if spans else None
        is_near = last is not None and last.run_id == run_id and start <= last.end + GAP_BYTES
        if last is not None and is_near and max(last.end, start + length) - last.start <= SPAN_BYTES:
            last.values.append(each)
            spans[-1] = last._replace(end=max(last.end, start + length))
        else:
            spans.append(Span(run_id, start, start + length, [each]))
    return spans


async def read_runs(objects: Objects, wanted: Sequence[Wanted]) -> set[str]:
    """Returns the runs that are gone, or shorter than they were: their memories hold nothing of use."""
    gate = asyncio.Semaphore(REQUESTS_AT_ONCE)
    gone: set[str] = set()

    async def read(span: Span) -> None:
        async with gate:
            content = await objects.get_range(run_key(span.run_id), span.start, span.end)
        if content is None or len(content) < span.end - span.start:
            if content is not None:
                _LOGGER.warning("run %s is shorter than the index says: its values are forgotten", span.run_id)
            gone.add(span.run_id)
            return
        for place, memory in span.values:
            at = place.offset - span.start
            memory[: place.length] = content[at : at + place.length]

    reads = [asyncio.ensure_future(read(span)) for span in spans_of(wanted)]
    try:
        await asyncio.gather(*reads)
    finally:
        for each in reads:
            each.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
    return gone
