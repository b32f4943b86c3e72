"""The past as an operator sees it: samples, causes of misses and the settings in use. Reads only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.clock import NS_PER_S, Clock
from kvstored.config import Config
from kvstored.telemetry import Flows, History

SERIES_A_SLICE = 4


class HistoryView:
    """Answers the History call. `config()` is what is in force."""

    def __init__(self, history: History, flows: Flows, config: Callable[[], Config], clock: Clock) -> None:
        self._history = history
        self._flows = flows
        self._config = config
        self._clock = clock

    async def history(self, request: pb.HistoryRequest) -> pb.HistoryReply:
        """Raises KVStoreError for a resolution that is not kept."""
        kept = self._history.resolutions_s
        resolution_s = request.resolution_s or min(kept)
        if resolution_s not in kept:
            listed = ", ".join(map(str, kept))
            raise KVStoreError(ErrorKind.INVALID, f"no samples of {resolution_s} s; this daemon keeps: {listed}")
        now_ns = self._clock.monotonic_ns()
        since_ns = now_ns - round(request.since_s * NS_PER_S) if request.since_s > 0 else -1
        window = self._history.window(resolution_s, since_ns)
        # Reckoned back from now, so that a step of the wall clock does not tear the samples apart.
        wall_ns = self._clock.wall_ns()
        reply = pb.HistoryReply(
            resolution_s=resolution_s,
            resolutions_s=kept,
            at_s=[(wall_ns - (now_ns - at_ns)) / NS_PER_S for at_ns in window.at_ns],
            span_s=window.span_s,
            misses=self._flows.misses_by_name(),
            settings=dict(_settings("", self._config())) if request.settings else {},
        )
        for number, series in enumerate(window.series):
            if number % SERIES_A_SLICE == 0:
                await asyncio.sleep(0)  # a day of all series is some milliseconds' work: clients go first
            scope, subject, name = series.key
            reply.series.add(scope=scope, subject=subject, name=name, is_flow=series.is_flow, values=series.values)
        return reply


def _settings(prefix: str, section: Any) -> Iterator[tuple[str, str]]:
    """Every setting by its dotted name."""
    for field in fields(section):
        value = getattr(section, field.name)
        name = f"{prefix}{field.name}"
        if field.name == "written":
            continue
        if field.name in ("tenants", "listed"):
            for part in value:
                yield from _settings(f"tenant.{part.name}." if field.name == "tenants" else f"{part.name}.", part)
        elif is_dataclass(value):
            yield from _settings(f"{name}.", value)
        else:
            yield name, " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
