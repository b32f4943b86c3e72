"""The figures for monitoring: counters, levels and request times as Prometheus metric families.

The module makes families of the replies that operators get, and keeps nothing. Invariant: the number of series does not
grow with the number of tenants: the first `NAMED_TENANTS` have their own, the others are summed up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.admin.sampler import NAMED_TENANTS, OTHER_TENANTS
from kvstored.lifecycle import Cause
from kvstored.telemetry.counters import COUNTERS
from kvstored.telemetry.latency import Counts, cumulative_s

Family = type[CounterMetricFamily] | type[GaugeMetricFamily]


@dataclass(frozen=True)
class MetricsSnapshot:
    """The daemon's figures at one moment, for a monitoring system. `misses` has the number of missed blocks by cause,
    and `latencies` has a histogram of request times for each verb (kind of request)."""

    status: pb.StatusReply
    tiers: pb.TiersReply
    tenants: pb.TenantsReply
    misses: dict[str, int]
    latencies: dict[str, Counts]


def families(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    yield from _daemon(snapshot.status)
    yield from _tiers(snapshot.tiers.tiers)
    yield from _lanes(snapshot.status.lanes)
    yield from _tenants(snapshot.tenants.tenants)
    misses = dict.fromkeys((cause.name.lower() for cause in Cause), 0) | snapshot.misses  # a rate needs the zeros
    missed = (([cause], blocks) for cause, blocks in sorted(misses.items()))
    yield _labelled(CounterMetricFamily, "missed_blocks", "blocks asked for in vain, by cause", ["cause"], missed)
    yield _requests(snapshot.latencies)


def _daemon(status: pb.StatusReply) -> Iterator[Metric]:
    yield InfoMetricFamily("kvstored", "the running daemon", {"version": status.version})
    for name, about, value in (
        ("up_seconds", "since the daemon started", status.uptime_s),
        ("ready_seconds", "from the start of the process to serving", status.ready_after_s),
        ("serving", "1 while requests are served", float(status.state == "serving")),
        ("resident_memory_bytes", "the process without arena pages", status.rss_bytes),
        ("clients", "sessions that are connected", status.clients),
        ("blocks", "blocks in any tier", status.blocks),
        ("leases", "leases that are held", status.leases),
        ("limbo_bytes", "slots of evicted blocks that a client may still read", status.limbo_bytes),
        ("prefault_bytes", "DRAM that prefault has touched", status.prefault_done_bytes),
        ("orphaned_blocks_now", "blocks stored whose parent is not", status.orphaned_blocks),
        ("warnings", "the warnings of kvctl status", len(status.warnings)),
        ("endurance_left_bytes", "what may be written to NVMe now", status.endurance.left_bytes),
        ("endurance_bytes_per_day", "the budget of writes to NVMe; 0 is no limit", status.endurance.bytes_per_day),
    ):
        yield GaugeMetricFamily(f"kvstored_{name}", about, value)
    degraded = (([item.part, item.mode], 1) for item in status.degraded)
    yield _labelled(GaugeMetricFamily, "degraded", "1 for each part in a degraded mode", ["part", "mode"], degraded)
    for name, value in sorted(status.counters.items()):
        yield CounterMetricFamily(f"kvstored_{name}", COUNTERS[name], value)


_TIER_LEVELS = {
    "capacity_bytes": "the tier's capacity",
    "used_bytes": "all that counts against the capacity",
    "blocks": "blocks with a copy in the tier",
    "quarantined_blocks": "slots out of use because they were damaged",
    "logical_bytes": "slots for the payloads of its blocks as they were put",
    "stored_bytes": "the slots that its blocks have",
    "lossy_blocks": "blocks whose payload is within an error bound of what was put",
}
_TIER_TOTALS = {  # by the field of the reply: the metric's name
    "hits": ("hits", "blocks that lookups and gets found in the tier"),
    "bytes_read": ("read_bytes", "bytes read from the medium"),
    "bytes_written": ("written_bytes", "bytes written to the medium"),
    "evicted_blocks": ("evicted_blocks", "blocks evicted from the tier"),
    "promoted_blocks": ("promoted_blocks", "blocks moved up from the tier"),
    "demoted_blocks": ("demoted_blocks", "blocks moved down from the tier"),
    "errors": ("errors", "reads and writes that the medium refused"),
}


_TIER_CODECS: dict[str, tuple[Family, str, str]] = {
    "ratio": (GaugeMetricFamily, "ratio", "bytes of payloads for one byte that the codec stored"),
    "encoding_s": (CounterMetricFamily, "encoding_seconds", "spent on encoding"),
    "decoding_s": (CounterMetricFamily, "decoding_seconds", "spent on decoding"),
}


def _tiers(tiers: Sequence[pb.TierStatus]) -> Iterator[Metric]:
    def by_tier(kind: Family, name: str, about: str, value: Callable[[pb.TierStatus], float]) -> Metric:
        samples = (([tier.name, tier.kind], value(tier)) for tier in tiers)
        return _labelled(kind, f"tier_{name}", about, ["tier", "kind"], samples)

    for field, about in _TIER_LEVELS.items():
        yield by_tier(GaugeMetricFamily, field, about, attrgetter(field))
    yield by_tier(GaugeMetricFamily, "ok", "1 while the tier does all of its work", lambda tier: tier.state == "ok")
    for field, (name, about) in _TIER_TOTALS.items():
        yield by_tier(CounterMetricFamily, name, about, attrgetter(field))
    for field, (kind, name, about) in _TIER_CODECS.items():
        samples = (([tier.name, codec.name], getattr(codec, field)) for tier in tiers for codec in tier.codecs)
        yield _labelled(kind, f"codec_{name}", about, ["tier", "codec"], samples)


def _lanes(lanes: Sequence[pb.LaneStatus]) -> Iterator[Metric]:
    def by_lane(kind: Family, name: str, about: str, value: Callable[[pb.LaneStatus], float]) -> Metric:
        return _labelled(kind, f"lane_{name}", about, ["lane"], (([lane.name], value(lane)) for lane in lanes))

    waiting = "blocks that wait or are moved now"
    yield by_lane(GaugeMetricFamily, "queued_blocks", waiting, lambda lane: lane.queued + lane.in_flight)
    yield by_lane(CounterMetricFamily, "moved_blocks", "blocks moved", attrgetter("moved_blocks"))
    yield by_lane(CounterMetricFamily, "moved_bytes", "bytes moved", attrgetter("moved_bytes"))
    yield by_lane(CounterMetricFamily, "refused_blocks", "blocks that found the queue full", attrgetter("refused"))


_TENANT_LEVELS = {
    "blocks": "blocks of the tenant",
    "host_bytes": "its slots in DRAM",
    "nvme_bytes": "its slots on NVMe",
    "clients": "its sessions",
}
_TENANT_TOTALS = {
    "lookups": "its lookups",
    "hit_blocks": "blocks handed out to it under leases",
    "missed_blocks": "blocks that it asked for and did not get",
    "refused_requests": "its requests that were refused because too much was under way",
}


def _tenants(tenants: Iterable[pb.TenantStatus]) -> Iterator[Metric]:
    summed: dict[str, dict[str, int]] = {}
    for number, tenant in enumerate(tenants):
        values = summed.setdefault(tenant.name if number < NAMED_TENANTS else OTHER_TENANTS, {})
        for field in (*_TENANT_LEVELS, *_TENANT_TOTALS):
            values[field] = values.get(field, 0) + getattr(tenant, field)
    for kind, fields in ((GaugeMetricFamily, _TENANT_LEVELS), (CounterMetricFamily, _TENANT_TOTALS)):
        for field, about in fields.items():
            samples = [([name], values[field]) for name, values in summed.items()]
            yield _labelled(kind, f"tenant_{field}", about, ["tenant"], samples)


def _requests(latencies: dict[str, Counts]) -> Metric:
    family = HistogramMetricFamily("kvstored_request_seconds", "from a request to its answer, by verb", labels=["verb"])
    for verb, counts in sorted(latencies.items()):
        buckets, sum_s = cumulative_s(counts)
        family.add_metric([verb], [(f"{edge:.6g}", count) for edge, count in buckets] + [("+Inf", sum(counts))], sum_s)
    return family


def _labelled(
    kind: Family, name: str, about: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Return a metric with labels. `samples`: the values of the labels, and the metric's value."""
    family = kind(f"kvstored_{name}", about, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
