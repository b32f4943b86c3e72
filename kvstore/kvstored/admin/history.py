"""The daemon's past for an operator: samples, causes of misses and the settings in use. The module only reads."""

from __future__ import annotations

import asyncio

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.clock import NS_PER_S
from kvstored.config import Config
from kvstored.store.assembly import Store
from kvstored.telemetry import History

SERIES_A_SLICE = 4


async def history(request: pb.HistoryRequest, kept: History, store: Store, config: Config) -> pb.HistoryReply:
    """Return the samples of figures in `kept` that `request` selects, with the causes of misses in `store` and the
    settings in `config`. Raises KVStoreError for a resolution (seconds from sample to sample) that is not kept."""
    resolution_s = request.resolution_s or min(kept.resolutions_s)
    if resolution_s not in kept.resolutions_s:
        listed = ", ".join(map(str, kept.resolutions_s))
        raise KVStoreError(ErrorKind.INVALID, f"no samples of {resolution_s} s; this daemon keeps: {listed}")
    now_ns = store.clock.monotonic_ns()
    asked_ns = request.since_s * NS_PER_S  # infinite, or no number, for all that is kept
    since_ns = now_ns - round(asked_ns) if 0 < asked_ns < now_ns else -1
    window = kept.window(resolution_s, since_ns)
    # Reckoned back from now, so that a step of the wall clock does not tear the samples apart.
    wall_ns = store.clock.wall_ns()
    reply = pb.HistoryReply(
        resolution_s=resolution_s,
        resolutions_s=kept.resolutions_s,
        at_s=[(wall_ns - (now_ns - at_ns)) / NS_PER_S for at_ns in window.at_ns],
        span_s=window.span_s,
        misses=store.flows.misses_by_name(),
        settings=_settings(config) if request.settings else {},
    )
    for number, series in enumerate(window.series):
        if number % SERIES_A_SLICE == 0:
            await asyncio.sleep(0)  # a day of all series is some milliseconds' work: clients go first
        scope, subject, name = series.key
        reply.series.add(scope=scope, subject=subject, name=name, is_flow=series.is_flow, values=series.values)
    return reply


def _settings(config: Config) -> dict[str, str]:
    """Return every setting by its dotted name."""
    found = {f"{section}.{field}": value for section, field, value in config.fields()}
    for tenant in config.tenants:
        found |= {f"tenant.{tenant.name}.{name}": value for name, value in vars(tenant).items()}
    found |= {"tenant_default": config.tenant_default, "source": config.source}
    return {
        name: " ".join(map(str, value)) if isinstance(value, tuple) else str(value) for name, value in found.items()
    }
