"""Commands that look: status, tiers, tenants. Each asks once and renders the reply as text."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping

from kvstore_client.cli.admin import AdminSocket
from kvstore_client.cli.budget import budget_line
from kvstore_client.cli.integrity import integrity_facts
from kvstore_client.cli.output import Output
from kvstore_client.cli.table import Column, render_facts, render_table
from kvstore_client.cli.units import human_bytes, human_count, human_seconds, human_share
from kvstore_proto.v1 import admin_pb2 as wire

KEY_DIGITS = 12  # shown of a key's 32; --json has them all


def status(admin: AdminSocket, _: argparse.Namespace) -> Output:
    reply = admin.call("Status", wire.StatusRequest(), wire.StatusReply)
    facts = [
        ("state", reply.state),
        ("version", f"{reply.version} (protocol {reply.protocol_version})"),
        ("pid", str(reply.pid)),
        ("up", human_seconds(reply.uptime_s)),
        ("ready after", human_seconds(reply.ready_after_s)),
        ("resident memory", human_bytes(reply.rss_bytes)),
        ("clients", human_count(reply.clients)),
        ("blocks", human_count(reply.blocks)),
        ("leases", human_count(reply.leases)),
        ("limbo", human_bytes(reply.limbo_bytes)),
        ("prefaulted", _progress(reply.prefault_done_bytes, reply.prefault_total_bytes)),
        ("config", reply.config_path or "built-in defaults"),
    ]
    budget = budget_line(reply)
    if budget:
        facts.append(("NVMe writes", budget))
    facts.extend((f"{part.part} is {part.mode}", part.reason) for part in reply.degraded)
    parts = [render_facts(facts)]
    parts.append(render_facts(integrity_facts(reply)))
    if reply.lanes:
        parts.append(_lanes(reply))
    if reply.counters:
        parts.append(render_facts([(name, human_count(reply.counters[name])) for name in sorted(reply.counters)]))
    parts.extend(f"warning: {warning}" for warning in reply.warnings)
    return Output("\n\n".join(parts), reply)


def tiers(admin: AdminSocket, _: argparse.Namespace) -> Output:
    reply = admin.call("Tiers", wire.TiersRequest(), wire.TiersReply)
    columns = [
        Column("TIER"),
        Column("STATE"),
        Column("USED", True),
        Column("CAPACITY", True),
        Column("FULL", True),
        Column("BLOCKS", True),
        Column("HITS", True),
        Column("READ", True),
        Column("WRITTEN", True),
        Column("EVICTED", True),
        Column("PROMOTED", True),
        Column("DEMOTED", True),
        Column("BAD", True),
        Column("PATH"),
    ]
    rows = [
        [
            tier.name,
            tier.state,
            human_bytes(tier.used_bytes),
            human_bytes(tier.capacity_bytes),
            human_share(tier.used_bytes, tier.capacity_bytes),
            human_count(tier.blocks),
            human_count(tier.hits),
            human_bytes(tier.bytes_read),
            human_bytes(tier.bytes_written),
            human_count(tier.evicted_blocks),
            human_count(tier.promoted_blocks),
            human_count(tier.demoted_blocks),
            human_count(tier.quarantined_blocks),
            tier.path,
        ]
        for tier in reply.tiers
    ]
    parts = [render_table(columns, rows, empty="no tiers are configured")]
    parts.extend(f"{tier.name} holds: {_by_use(tier.used_by)}" for tier in reply.tiers if tier.used_by)
    parts.extend(f"{tier.name} expects: {_by_class(tier)}" for tier in reply.tiers if tier.residency_bytes)
    budget = budget_line(admin.call("Status", wire.StatusRequest(), wire.StatusReply))
    parts.extend([f"nvme writes: {budget}"] if budget else [])
    return Output("\n".join(parts), reply)


def tenants(admin: AdminSocket, _: argparse.Namespace) -> Output:
    reply = admin.call("Tenants", wire.TenantsRequest(), wire.TenantsReply)
    columns = [
        Column("TENANT"),
        Column("CLIENTS", True),
        Column("BLOCKS", True),
        Column("HOST", True),
        Column("NVME", True),
        Column("QUOTA", True),
        Column("LIMBO", True),
        Column("LOOKUPS", True),
        Column("BLOCK HITS", True),
        Column("MODELS", True),
    ]
    rows = []
    for tenant in reply.tenants:
        rows.append(
            [
                tenant.name,
                *_use(tenant),
                human_bytes(tenant.quota_bytes) if tenant.quota_bytes else "none",
                human_bytes(tenant.limbo_bytes),
                *_served(tenant),
                human_count(len(tenant.fingerprints)),
            ]
        )
        rows += [
            [f"{tenant.name}/{account.name}", *_use(account), "", "", *_served(account), ""]
            for account in by_bytes(tenant.accounts)
        ]
    return Output(render_table(columns, rows, empty="no tenant has connected yet"), reply)


def by_bytes(accounts: Iterable[wire.AccountStatus]) -> list[wire.AccountStatus]:
    """Those that hold most first."""
    return sorted(accounts, key=lambda account: -(account.host_bytes + account.nvme_bytes))


def _use(holder: wire.TenantStatus | wire.AccountStatus) -> list[str]:
    return [
        human_count(holder.clients),
        human_count(holder.blocks),
        human_bytes(holder.host_bytes),
        human_bytes(holder.nvme_bytes),
    ]


def _served(holder: wire.TenantStatus | wire.AccountStatus) -> list[str]:
    return [human_count(holder.lookups), human_share(holder.hit_blocks, holder.hit_blocks + holder.missed_blocks)]


def _lanes(reply: wire.StatusReply) -> str:
    columns = [
        Column("LANE"),
        Column("QUEUED", True),
        Column("IN FLIGHT", True),
        Column("BLOCKS", True),
        Column("MOVED", True),
        Column("NOW", True),
        Column("REFUSED", True),
    ]
    rows = [
        [
            lane.name,
            human_count(lane.queued),
            human_count(lane.in_flight),
            human_count(lane.moved_blocks),
            human_bytes(lane.moved_bytes),
            f"{human_bytes(int(lane.bytes_per_s))}/s",
            human_count(lane.refused),
        ]
        for lane in reply.lanes
    ]
    return render_table(columns, rows, empty="")


def _progress(done_bytes: int, total_bytes: int) -> str:
    return f"{human_bytes(done_bytes)} of {human_bytes(total_bytes)} ({human_share(done_bytes, total_bytes)})"


def _by_class(tier: wire.TierStatus) -> str:
    """How soon the tier's policy expects to need what it holds."""
    parts = [
        f"{name} {human_count(tier.residency[name])} blocks, {human_bytes(tier.residency_bytes[name])}"
        for name in ("hot", "warm", "cold")
    ]
    return "; ".join(parts) + (f" (by {tier.policy})" if tier.policy else "")


def _by_use(used_by: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {human_bytes(used_by[name])}" for name in sorted(used_by) if used_by[name]) or "nothing"
