"""Commands that look: status, tiers. Each asks once and renders the reply as text."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

from kvctl.admin import AdminSocket
from kvctl.budget import budget_line
from kvctl.output import Output
from kvstore_console.table import render_facts, render_table
from kvstore_console.units import human_bytes, human_count, human_seconds, human_share
from kvstore_proto.v1 import admin_pb2 as wire

KEY_DIGITS = 12  # shown of a key's 32; --json has them all
_TIERS = (
    "TIER", "STATE", ">USED", ">CAPACITY", ">FULL", ">BLOCKS", ">HITS", ">READ", ">WRITTEN", ">EVICTED", ">PROMOTED",
    ">DEMOTED", ">BAD", "PATH",
)  # fmt: skip
_LANES = ("LANE", ">QUEUED", ">IN FLIGHT", ">BLOCKS", ">MOVED", ">NOW", ">REFUSED")


def status(admin: AdminSocket, _: argparse.Namespace) -> Output:
    reply = admin.call("Status", wire.StatusRequest(), wire.StatusReply)
    done, total = reply.prefault_done_bytes, reply.prefault_total_bytes
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
        ("prefaulted", f"{human_bytes(done)} of {human_bytes(total)} ({human_share(done, total)})"),
        ("config", reply.config_path or "built-in defaults"),
    ]
    if budget := budget_line(reply):
        facts.append(("NVMe writes", budget))
    facts.extend((f"{part.part} is {part.mode}", part.reason) for part in reply.degraded)
    integrity = [
        ("scrubber", _scrubber(reply.scrub)),
        ("last full scrub", _ago(reply.scrub.last_pass_s)),
        ("orphaned blocks", human_count(reply.orphaned_blocks)),
        ("own books", _books(reply.books)),
    ]
    counters = [(name, human_count(reply.counters[name])) for name in sorted(reply.counters)]
    parts = [render_facts(facts), render_facts(integrity), _lanes(reply), render_facts(counters)]
    parts.extend(f"warning: {warning}" for warning in reply.warnings)
    return Output("\n\n".join(part for part in parts if part), reply)


def tiers(admin: AdminSocket, _: argparse.Namespace) -> Output:
    reply = admin.call("Tiers", wire.TiersRequest(), wire.TiersReply)
    rows = [
        [
            tier.name, tier.state, human_bytes(tier.used_bytes), human_bytes(tier.capacity_bytes),
            human_share(tier.used_bytes, tier.capacity_bytes), human_count(tier.blocks), human_count(tier.hits),
            human_bytes(tier.bytes_read), human_bytes(tier.bytes_written), human_count(tier.evicted_blocks),
            human_count(tier.promoted_blocks), human_count(tier.demoted_blocks), human_count(tier.quarantined_blocks),
            tier.path,
        ]
        for tier in reply.tiers
    ]  # fmt: skip
    parts = [render_table(_TIERS, rows, empty="no tiers are configured")]
    parts.extend(f"{tier.name} holds: {_by_use(tier.used_by)}" for tier in reply.tiers if tier.used_by)
    parts.extend(f"{tier.name} expects: {_by_class(tier)}" for tier in reply.tiers if tier.residency_bytes)
    status = admin.call("Status", wire.StatusRequest(), wire.StatusReply)
    names = {tier.name for tier in reply.tiers}
    parts.extend(warning for warning in status.warnings if warning.partition(":")[0] in names)
    budget = budget_line(status)
    parts.extend([f"nvme writes: {budget}"] if budget else [])
    return Output("\n".join(parts), reply)


def _lanes(reply: wire.StatusReply) -> str:
    rows = [
        [
            lane.name, human_count(lane.queued), human_count(lane.in_flight), human_count(lane.moved_blocks),
            human_bytes(lane.moved_bytes), f"{human_bytes(lane.bytes_per_s)}/s", human_count(lane.refused),
        ]
        for lane in reply.lanes
    ]  # fmt: skip
    return render_table(_LANES, rows)


def _scrubber(scrub: wire.ScrubStatus) -> str:
    if scrub.state in ("", "off"):
        return "off"
    text = f"{scrub.state}, {human_bytes(scrub.read_bytes)} in {human_count(scrub.read_slots)} slots read"
    return text + (f", {human_count(scrub.corrupt)} found damaged" if scrub.corrupt else "")


def _books(books: wire.BooksStatus) -> str:
    if books.broken:
        return f"BROKEN: {books.broken[0]}"
    if not books.walks:
        return "not walked yet"
    return f"hold; {human_count(books.rows)} rows walked {_ago(books.last_walk_s)}"


def _ago(at_s: float) -> str:
    return f"{human_seconds(max(0.0, time.time() - at_s))} ago" if at_s else "never"


def _by_class(tier: wire.TierStatus) -> str:
    """How soon the tier's policy expects to need what it holds."""
    parts = [
        f"{name} {human_count(tier.residency[name])} blocks, {human_bytes(tier.residency_bytes[name])}"
        for name in ("hot", "warm", "cold")
    ]
    return "; ".join(parts) + (f" (by {tier.policy})" if tier.policy else "")


def _by_use(used_by: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {human_bytes(used_by[name])}" for name in sorted(used_by) if used_by[name]) or "nothing"
