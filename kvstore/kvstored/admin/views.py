"""Status, tiers, tenants and blocks for an operator. The module reads the reports of all parts and keeps nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvstore_proto.arena import ALIGNMENT_BYTES, HEADER_BYTES
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstore_tiers.codec_rates import CodecRates
from kvstore_tiers.codecs import codec_name
from kvstored import __version__
from kvstored.admin.lifetime import Phase
from kvstored.clients.reception import PROTOCOL_VERSION
from kvstored.clients.sessions import ClientSessions
from kvstored.clients.tenants import Tenant, TenantDirectory
from kvstored.clients.tenants.reach import out_of_reach
from kvstored.clock import NS_PER_S
from kvstored.health.integrity import Integrity, IntegrityReport
from kvstored.health.maintenance import Maintenance
from kvstored.store.assembly import Store
from kvstored.store.blocks import Residency
from kvstored.store.degraded.modes import Mode
from kvstored.store.policies import ResidencyClass
from kvstored.store.policies.boundaries import SPENT
from kvstored.unsaved import Unsaved


class DaemonParts(NamedTuple):
    """The parts of the daemon that an operator's views read."""

    store: Store
    tenants: TenantDirectory
    sessions: ClientSessions
    unsaved: Unsaved


class Views:
    """A service that shows an operator the present state: the daemon's status, its tiers, tenants and single blocks. It
    reads `parts` of the daemon, the daemon's `phase`, and the reports of `maintenance` and `integrity`."""

    def __init__(self, parts: DaemonParts, phase: Phase, maintenance: Maintenance, integrity: Integrity) -> None:
        self.parts = parts
        self._phase = phase
        self._maintenance = maintenance
        self._integrity = integrity
        self._store = parts.store
        self._started_ns = self._store.clock.monotonic_ns()

    def status(self) -> pb.StatusReply:
        parts, store = self.parts, self._store
        now_ns = store.clock.monotonic_ns()
        done_bytes, total_bytes = self._maintenance.prefaulted
        reply = pb.StatusReply(
            version=__version__,
            protocol_version=PROTOCOL_VERSION,
            pid=os.getpid(),
            uptime_s=(now_ns - self._started_ns) / NS_PER_S,
            ready_after_s=self._phase.ready_after_s,
            state=self._phase.state.value,
            rss_bytes=resident_bytes(),
            clients=len(parts.sessions),
            blocks=len(store.residency),
            leases=store.leases.live,
            limbo_bytes=store.leases.limbo_bytes(),
            prefault_done_bytes=done_bytes,
            prefault_total_bytes=total_bytes,
            counters=store.counters.snapshot(),
            config_path=store.config.source,
            warnings=[
                *store.modes.sentences(),
                *self._other_tier_messages(),
                *out_of_reach(parts.tenants, store.residency),
                *parts.unsaved.sentences(),
                *parts.sessions.containers.sentences(),
            ],
        )
        for item in store.modes.all():
            reply.degraded.add(
                part=item.part, mode=item.mode.value, reason=item.reason, for_s=(now_ns - item.since_ns) / NS_PER_S
            )
        if store.writeback is not None:
            budget = store.endurance.report()
            reply.endurance.CopyFrom(
                pb.EnduranceStatus(
                    bytes_per_day=budget.bytes_per_day,
                    left_bytes=budget.left_bytes,
                    spent_bytes=budget.spent_bytes,
                    scarce=budget.scarce,
                    trouble=budget.trouble,
                )
            )
            if budget.trouble:
                reply.warnings.append(budget.trouble)
        _describe_integrity(self._integrity.report, reply)
        for lane in store.mover.lanes.values():
            report = lane.statistics(now_ns)
            reply.lanes.add(
                name=report.name,
                queued=sum(report.queued),
                in_flight=sum(report.in_flight),
                moved_blocks=sum(report.moved_blocks),
                moved_bytes=sum(report.moved_bytes),
                refused=sum(report.refused),
                bytes_per_s=report.bytes_per_s,
                queued_by_priority=list(report.queued),
            )
        return reply

    def _other_tier_messages(self) -> list[str]:
        """Return the messages of tiers that are not degraded."""
        store = self._store
        degraded = {item.part for item in store.modes.all()}
        reports = [(name, tier.statistics()) for name, tier in zip(store.residency.tiers, store.tiers, strict=True)]
        return [f"{name}: {report.message}" for name, report in reports if report.message and name not in degraded]

    def _state_of(self, position: int) -> str:
        """Return the degraded mode of a tier, or the state that it reports."""
        store = self._store
        mode = store.modes.mode(store.residency.tiers[position])
        return store.tiers[position].statistics().state.value if mode is Mode.OK else mode.value

    def tiers(self, *, with_classes: bool = True) -> pb.TiersReply:
        """Return the status of all tiers. If `with_classes` is set, also count each tier's hot, warm and cold blocks,
        which takes some 15 ms for a million blocks."""
        store = self._store
        now_ns = store.clock.monotonic_ns()
        reply = pb.TiersReply()
        for position, (tier, policy) in enumerate(zip(store.tiers, store.policies, strict=True)):
            report, flow = tier.statistics(), store.flows.tiers[position]
            used_by = dict(report.used_by)
            if position == store.residency.mapped or position in store.residency.exported:
                containers = {report.container for report in tier.containers()}
                used_by["limbo"] = store.leases.limbo_in(containers.__contains__)  # the tier counts them as blocks
                used_by["blocks"] -= used_by["limbo"]
            reply.tiers.add(
                name=store.residency.tiers[position],
                kind=tier.info.kind,
                path=store.config.tiers[position].place,
                state=self._state_of(position),
                capacity_bytes=report.capacity_bytes,
                used_bytes=report.used_bytes,
                blocks=store.residency.tier_blocks(position),
                hits=flow.hits,
                bytes_read=report.bytes_read,
                bytes_written=report.bytes_written,
                evicted_blocks=flow.evicted_blocks,
                promoted_blocks=flow.promoted_blocks,
                demoted_blocks=flow.demoted_blocks,
                quarantined_blocks=report.quarantined_slots,
                errors=report.errors,
                used_by=used_by,
                residency=_by_name(policy.class_counts(now_ns)) if with_classes else None,
                residency_bytes=_by_name(policy.class_bytes(now_ns)) if with_classes else None,
                policy=policy.name,
                codec=tier.info.coding.codec,
                codecs=_codecs(tier.info.coding.rates),
                **_forms(store.residency, position),
            )
        return reply

    def tenants(self) -> pb.TenantsReply:
        parts, residency = self.parts, self._store.residency
        reply = pb.TenantsReply()
        for number, index in enumerate(residency.tenants):
            sessions = [session for session in parts.sessions.all() if session.tenant_id == number]
            tenant = parts.tenants.by_digest(bytes.fromhex(index.name))
            flow = self._store.flows.tenants[number]
            reply.tenants.add(
                name=parts.tenants.name_of_index(index.name),
                blocks=residency.tenant_blocks(number),
                host_bytes=residency.tenant_bytes(number, residency.mapped)
                + residency.reserved_bytes(number, residency.mapped),
                nvme_bytes=residency.tenant_bytes(number, residency.durable) if residency.durable >= 0 else 0,
                clients=len(sessions),
                lookups=flow.lookups,
                hit_blocks=flow.hit_blocks,
                missed_blocks=flow.missed_blocks,
                refused_requests=flow.refused_requests,
                shares=() if tenant is None else self._shares(tenant),
                limbo_bytes=self._store.leases.limbo_bytes(number),
                fingerprints=sorted(
                    parts.tenants.fingerprint_label(parts.tenants.fingerprint_digest(fingerprint))
                    for fingerprint in index.fingerprints
                ),
            )
        return reply

    def _shares(self, tenant: Tenant) -> Iterator[pb.ShareStatus]:
        for tier, share in tenant.limits.shares:
            yield pb.ShareStatus(tier=tier, **vars(share))

    def describe(self, row: int, block: pb.BlockStatus) -> None:
        """Fill in the message `block` with the status of the readable block at `row` of the block index."""
        parts, residency = self.parts, self._store.residency
        now_ns = self._store.clock.monotonic_ns()
        kind = residency.kind(row)
        here = [position for position in range(len(residency.tiers)) if residency.has(row, position)]
        block.key = residency.key(row).hex()
        block.parent = residency.parent_key(row).hex()
        block.tenant = parts.tenants.name_of_index(residency.tenants[kind.tenant].name)
        block.fingerprint = parts.tenants.fingerprint_label(parts.tenants.fingerprint_digest(kind.fingerprint_id))
        block.group = kind.group
        block.depth = residency.depth(row)
        block.payload_bytes = residency.payload_bytes(row)
        block.tiers.extend(residency.tiers[position] for position in here)
        errors = [residency.exactness.error(row, position) for position in here]
        block.errors.extend(errors if any(errors) else ())
        block.state = residency.state(row, here[0]).name.lower()
        durable = self._store.writeback is not None and self._store.writeback.is_durable(row)
        block.durability = "durable" if durable else "volatile"
        block.accesses = residency.accesses(row)
        block.idle_s = (now_ns - residency.last_access_ns(row)) / NS_PER_S
        block.pinned_by.extend(self._store.retention.pins.names(row))
        block.leases = residency.pin_count(row) - bool(block.pinned_by)
        block.children = residency.children(row)
        block.residency = self._store.policies[here[0]].residency_class(row, now_ns).value
        if expires_s := residency.expires_s(row):
            block.expires_in_s = max(expires_s - now_ns / NS_PER_S, 0.001)
        priority = residency.priority(row)
        block.priority, block.spent = 0 if priority == SPENT else priority, priority == SPENT
        block.kind = parts.tenants.state_kind(kind.fingerprint_id, kind.group)
        slot = residency.slot(row, here[-1])
        block.location = self._store.tiers[here[-1]].location(slot)


def _describe_integrity(report: IntegrityReport, reply: pb.StatusReply) -> None:
    """Fill in the reply, and warn if something is wrong."""
    scrub, books = report.scrub, report.books
    reply.orphaned_blocks = report.orphaned_blocks
    reply.scrub.CopyFrom(pb.ScrubStatus(**vars(scrub)))
    reply.books.CopyFrom(pb.BooksStatus(**vars(books)))
    if scrub.message:
        reply.warnings.append(scrub.message)
    reply.warnings.extend(f"a broken invariant, please report it: {fault}" for fault in books.broken)


def _codecs(rates: CodecRates) -> list[pb.CodecStatus]:
    return [
        pb.CodecStatus(
            name=codec_name(number),
            ratio=rates.ratio(number),
            encoding_s=rates.encoding[number].total_s,
            decoding_s=rates.read_core[number].total_s + rates.decoding_core[number].total_s,
            decoding_bytes_per_s=min(rates.decoding[number].bytes_per_s, rates.decoding_core[number].bytes_per_s),
        )
        for number in rates.codecs
    ]


def _forms(residency: Residency, position: int) -> dict[str, int]:
    """Return what a tier's blocks would take as they were put, what they take, and how many of them are lossy."""
    copies = residency.copies[position]
    rows = np.flatnonzero(np.frombuffer(copies.state, np.uint8))
    payload_bytes = np.frombuffer(residency.rows.payload_bytes, np.uint32)[rows].astype(np.int64)
    whole_bytes = HEADER_BYTES + -(-payload_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    errors = copies.optional.view("error")
    return {
        "logical_bytes": int(whole_bytes.sum()),
        "stored_bytes": sum(copies.bytes_by_tenant),
        "lossy_blocks": 0 if errors is None else int(np.count_nonzero(errors[rows])),
    }


def _by_name(classes: Mapping[ResidencyClass, int]) -> dict[str, int]:
    return {kind.value: value for kind, value in classes.items()}


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, without shared memory such as arenas."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


def tier_named(residency: Residency, name: str) -> int:
    """Return the position of the tier `name`, counted from the fastest. Raises KVStoreError, which lists the existing
    tiers, for an unknown name."""
    if name not in residency.tiers:
        known = ", ".join(residency.tiers)
        raise KVStoreError(ErrorKind.INVALID, f"no tier {name!r}; this daemon has: {known}")
    return residency.tier(name)
