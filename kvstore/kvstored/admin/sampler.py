"""Samples for the history: one reading of every part, at most once a second.

The module reads the reports of the parts and keeps nothing but the history. Invariant: the number of series does not
grow with the number of tenants: the first `NAMED_TENANTS` have their own, the others are summed up.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstored.admin.views import DaemonParts, resident_bytes
from kvstored.telemetry import History, Latencies
from kvstored.telemetry.history import Reading, SeriesKey

NAMED_TENANTS = 7
OTHER_TENANTS = "(others)"
# Of the counters, those that a person wants to see over time.
COUNTED = (
    "lookups", "lookup_keys", "lookup_hit_keys", "acquires", "acquired_blocks", "acquire_timeouts",
    "stored_blocks", "stored_bytes", "no_room_blocks", "over_quota_blocks", "declined_blocks", "evicted_blocks",
    "corrupt_blocks",
)  # fmt: skip

_Total = Iterator[tuple[SeriesKey, int]]
_Level = Iterator[tuple[SeriesKey, float]]


class MetricsSampler:
    """A component that takes the samples of the daemon's history: it reads the figures of all parts of the daemon. Call
    `sample` from a timer a few times a second."""

    def __init__(self, parts: DaemonParts, latencies: Latencies) -> None:
        self._parts = parts
        self._store = parts.store
        self._latencies = latencies
        self.history = History(self._store.clock.monotonic_ns())

    def sample(self) -> None:
        now_ns = self._store.clock.monotonic_ns()
        if self.history.due(now_ns):
            self.history.add(self._reading(now_ns), now_ns)

    def _reading(self, now_ns: int) -> Reading:
        levels = {**dict(self._daemon_levels()), **dict(self._tier_levels()), **dict(self._lane_levels(now_ns))}
        totals = {**dict(self._daemon_totals()), **dict(self._tier_totals()), **dict(self._lane_totals(now_ns))}
        for key, value in self._tenants():
            chosen = levels if key.name.endswith("_bytes") else totals
            chosen[key] = int(chosen.get(key, 0)) + value
        return Reading(levels, totals, self._latencies.snapshot())

    def _daemon_levels(self) -> _Level:
        parts = self._parts
        for name, level in (
            ("clients", len(parts.sessions)),
            ("blocks", len(self._store.residency)),
            ("leases", self._store.leases.live),
            ("limbo_bytes", self._store.leases.limbo_bytes()),
            ("rss_bytes", resident_bytes()),
        ):
            yield SeriesKey("daemon", "", name), level

    def _daemon_totals(self) -> _Total:
        for name in COUNTED:
            yield SeriesKey("daemon", "", name), self._store.counters[name]
        for cause, blocks in self._store.flows.misses_by_name().items():
            yield SeriesKey("miss", cause, "blocks"), blocks

    def _tier_levels(self) -> _Level:
        for position, (name, tier) in enumerate(zip(self._store.residency.tiers, self._store.tiers, strict=True)):
            report = tier.statistics()
            yield SeriesKey("tier", name, "used_bytes"), report.used_bytes
            yield SeriesKey("tier", name, "capacity_bytes"), report.capacity_bytes
            yield SeriesKey("tier", name, "blocks"), self._store.residency.tier_blocks(position)

    def _tier_totals(self) -> _Total:
        for position, (name, tier) in enumerate(zip(self._store.residency.tiers, self._store.tiers, strict=True)):
            report, flow = tier.statistics(), self._store.flows.tiers[position]
            yield SeriesKey("tier", name, "hits"), flow.hits
            yield SeriesKey("tier", name, "read_bytes"), report.bytes_read
            yield SeriesKey("tier", name, "written_bytes"), report.bytes_written
            yield SeriesKey("tier", name, "evicted_blocks"), flow.evicted_blocks

    def _lane_levels(self, now_ns: int) -> _Level:
        for lane in self._store.mover.lanes.values():
            report = lane.statistics(now_ns)
            yield SeriesKey("lane", report.name, "queued"), sum(report.queued) + sum(report.in_flight)

    def _lane_totals(self, now_ns: int) -> _Total:
        for lane in self._store.mover.lanes.values():
            report = lane.statistics(now_ns)
            yield SeriesKey("lane", report.name, "moved_bytes"), sum(report.moved_bytes)
            yield SeriesKey("lane", report.name, "moved_blocks"), sum(report.moved_blocks)

    def _tenants(self) -> _Total:
        parts, residency = self._parts, self._store.residency
        tiers = [
            ("host_bytes", residency.mapped),
            *([("nvme_bytes", residency.durable)] if residency.durable >= 0 else []),
        ]
        for number, index in enumerate(residency.tenants):
            name = parts.tenants.name_of_index(index.name) if number < NAMED_TENANTS else OTHER_TENANTS
            for what, position in tiers:
                yield SeriesKey("tenant", name, what), residency.tenant_bytes(number, position)
            flow = self._store.flows.tenants[number]
            yield SeriesKey("tenant", name, "hit_blocks"), flow.hit_blocks
            yield SeriesKey("tenant", name, "missed_blocks"), flow.missed_blocks
