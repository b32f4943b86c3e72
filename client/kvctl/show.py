"""Commands that look: status, tiers, tenants, config. Each asks once and renders the reply as text. tenants can also
rename a tenant, and set its share of a tier.
"""

from __future__ import annotations

import argparse
import difflib
import time
from collections.abc import Iterable, Iterator, Mapping

from kvctl.connection import AdminSocket
from kvctl.output import USAGE, CommandError, Output
from kvstore_console.table import render_facts, render_table
from kvstore_console.units import human_blocks, human_bytes, human_count, human_seconds, human_share, plural
from kvstore_proto.v1 import admin_pb2 as wire

TIER_HEADINGS = (
    "TIER", "STATE", ">USED", ">CAPACITY", ">FULL", ">BLOCKS", ">HITS", ">READ", ">WRITTEN", ">EVICTED",
)  # fmt: skip
_LANES = ("LANE", ">QUEUED", ">IN FLIGHT", ">BLOCKS", ">MOVED", ">NOW", ">REFUSED")
_HEADINGS = (
    "TENANT", ">CLIENTS", ">BLOCKS", ">HOST", ">NVME", ">LIMBO", ">LOOKUPS", ">BLOCK HITS", ">MODELS", "SHARES",
    "RECOGNISED BY",
)  # fmt: skip
Holder = wire.TenantStatus | wire.AccountStatus
DEFAULT, UNSET = "default", "default"
_COLUMNS = ("SETTING", "VALUE", "IN FORCE", "FROM")


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
            *tier_cells(tier), human_count(tier.promoted_blocks), human_count(tier.demoted_blocks),
            human_count(tier.quarantined_blocks), tier.path,
        ]
        for tier in reply.tiers
    ]  # fmt: skip
    headings = (*TIER_HEADINGS, ">PROMOTED", ">DEMOTED", ">BAD", "PATH")
    parts = [render_table(headings, rows, empty="no tiers are configured")]
    parts.extend(f"{tier.name} holds: {_by_use(tier.used_by)}" for tier in reply.tiers if tier.used_by)
    parts.extend(f"{tier.name} expects: {_by_class(tier)}" for tier in reply.tiers if tier.residency_bytes)
    parts.extend(f"{tier.name} stores: {_forms(tier)}" for tier in reply.tiers if tier.codec not in ("", "none"))
    status = admin.call("Status", wire.StatusRequest(), wire.StatusReply)
    names = {tier.name for tier in reply.tiers}
    parts.extend(warning for warning in status.warnings if warning.partition(":")[0] in names)
    budget = budget_line(status)
    parts.extend([f"nvme writes: {budget}"] if budget else [])
    return Output("\n".join(parts), reply)


def _forms(tier: wire.TierStatus) -> str:
    """Return what the blocks of a tier with a codec would take as they were put, and what they take."""
    text = f"{human_bytes(tier.logical_bytes)} of blocks in {human_bytes(tier.stored_bytes)}, codec {tier.codec}"
    if tier.stored_bytes:
        text += f", ratio {tier.logical_bytes / tier.stored_bytes:.2f}"
    return text + (f", {human_blocks(tier.lossy_blocks)} lossy" if tier.lossy_blocks else "")


def tier_cells(tier: wire.TierStatus) -> list[str]:
    """Return the cells of the row for `tier` in the table of tiers, in the order of the columns `TIER_HEADINGS`."""
    return [
        tier.name, tier.state, human_bytes(tier.used_bytes), human_bytes(tier.capacity_bytes),
        human_share(tier.used_bytes, tier.capacity_bytes), human_count(tier.blocks), human_count(tier.hits),
        human_bytes(tier.bytes_read), human_bytes(tier.bytes_written), human_count(tier.evicted_blocks),
    ]  # fmt: skip


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
    """Return how many blocks of `tier` its policy expects to need soon, later and hardly ever."""
    parts = [
        f"{name} {human_count(tier.residency[name])} blocks, {human_bytes(tier.residency_bytes[name])}"
        for name in ("hot", "warm", "cold")
    ]
    return "; ".join(parts) + (f" (by {tier.policy})" if tier.policy else "")


def _by_use(used_by: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {human_bytes(used_by[name])}" for name in sorted(used_by) if used_by[name]) or "nothing"


def budget_line(status: wire.StatusReply) -> str:
    """Return the line of `kvctl status` about the budget of writes to NVMe, or "" if there is no NVMe tier."""
    if not status.HasField("endurance"):
        return ""
    budget = status.endurance
    if not budget.bytes_per_day:
        text = f"no limit, {human_bytes(budget.spent_bytes)} charged since the start"
    else:
        share = human_share(budget.left_bytes, budget.bytes_per_day)
        text = f"{human_bytes(budget.left_bytes)} of {human_bytes(budget.bytes_per_day)} a day left ({share})"
        text += ", scarce" if budget.scarce else ""
    refused = [
        f"{human_count(status.counters[name])} {what}"
        for name, what in (
            ("admission_refused_blocks", "by admission"),
            ("budget_refused_blocks", "for the budget"),
            ("shed_blocks", "because NVMe was degraded"),
        )
        if status.counters.get(name)
    ]
    return text + (f"; blocks refused: {', '.join(refused)}" if refused else "")


def tenants(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    acts = {"list": _list, "rename": _rename, "set": _set, "reset": _set, "drop": _drop}
    return acts[arguments.action](admin, arguments)


def by_bytes(accounts: Iterable[wire.AccountStatus]) -> list[wire.AccountStatus]:
    """Return `accounts` sorted by the bytes that each account holds, largest first."""
    return sorted(accounts, key=lambda account: -(account.host_bytes + account.nvme_bytes))


def _list(admin: AdminSocket, _: argparse.Namespace) -> Output:
    reply = admin.call("Tenants", wire.TenantsRequest(), wire.TenantsReply)
    rows = []
    for tenant in reply.tenants:
        models, limbo = human_count(len(tenant.fingerprints)), human_bytes(tenant.limbo_bytes)
        shares, callers = ", ".join(map(_share, tenant.shares)), ", ".join(tenant.recognised_by) or "nobody"
        rows.append(_row(tenant.name, tenant, limbo, models, shares, callers))
        rows += [_row(f"{tenant.name}/{account.name}", account) for account in by_bytes(tenant.accounts)]
    return Output(render_table(_HEADINGS, rows, empty="no tenant has connected yet"), reply)


def _share(share: wire.ShareStatus) -> str:
    words = [share.tier]
    words += [f"min {human_bytes(share.min_bytes)}"] if share.min_bytes else []
    words += [f"max {human_bytes(share.max_bytes)}"] if share.max_bytes else []
    words += [f"weight {share.weight}"] if share.weight else []
    return " ".join(words)


def _row(
    name: str, holder: Holder, limbo: str = "", models: str = "", shares: str = "", callers: str = ""
) -> list[str]:
    return [
        name, human_count(holder.clients), human_count(holder.blocks), human_bytes(holder.host_bytes),
        human_bytes(holder.nvme_bytes), limbo, human_count(holder.lookups),
        human_share(holder.hit_blocks, holder.hit_blocks + holder.missed_blocks), models, shares, callers,
    ]  # fmt: skip


def _rename(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    old, new = arguments.names
    request = wire.RenameTenantRequest(old=old, new=new, replace=arguments.replace)
    reply = admin.call("RenameTenant", request, wire.RenameTenantReply, longer_s=arguments.wait)
    lines = [f"{new} has {human_blocks(reply.blocks, reply.bytes)} of {old}"]
    if reply.replaced_blocks:
        lines.append(f"dropped {human_blocks(reply.replaced_blocks, reply.replaced_bytes)} that {new} had before")
    if reply.clients:
        clients = "1 client has" if reply.clients == 1 else f"{human_count(reply.clients)} clients have"
        lines.append(f"{clients} to connect again, and ours do so by themselves")
    return Output("\n".join(lines), reply)


def _drop(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    (name,) = arguments.names
    request = wire.DropTenantRequest(name=name)
    reply = admin.call("DropTenant", request, wire.DropTenantReply, longer_s=arguments.wait)
    lines = [f"dropped {human_blocks(reply.blocks, reply.bytes)} of {name}, and what the small state said of them"]
    if reply.clients:
        had = plural(reply.clients, "client")
        lines.append(f"{had} disconnected: end processes that have objects mapped, whose memory gets other bytes now")
    if reply.kept_blocks:
        lines.append(f"{human_blocks(reply.kept_blocks)} stayed in use all the while: drop again")
    if reply.key_destroyed:
        lines.append("its key is destroyed: what it encrypted cannot be read, nor in backups without the file keys")
    else:
        lines.append("it had no key: its bytes on NVMe stay in freed slots until they are overwritten")
    lines.append(f"{human_count(reply.slots)} slots on NVMe were looked at: {reply.readable_slots} are readable")
    return Output("\n".join(lines), reply)


def _set(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    """Give a tenant of the running daemon settings; they last until they are reset."""
    values = {f"{arguments.tier}_{what}": getattr(arguments, what) for what in ("min", "max", "weight")}
    values |= {"ttl_s": arguments.ttl, "priority": arguments.priority}
    given = {key: str(value) for key, value in values.items() if value is not None}
    unset = [key for key, value in given.items() if value == UNSET]
    settings = {key: value for key, value in given.items() if value != UNSET}
    request = wire.SetTenantRequest(name=arguments.names[0], settings=settings, unset=unset)
    request.reset = arguments.action == "reset"
    reply = admin.call("SetTenant", request, wire.SetTenantReply)
    text = f"in force, and after a restart: {reply.tenant}"
    return Output(f"{text}\n{reply.nobody}" if reply.nobody else text, reply)


def config(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    reply = admin.call("Config", wire.ConfigRequest(), wire.ConfigReply)
    _check(arguments.names, reply.settings)
    chosen = [
        each
        for each in reply.settings
        if (not arguments.names or any(_is_part(_name(each), name) for name in arguments.names))
        and not (arguments.changed and each.origin == DEFAULT and not each.waiting)
    ]
    del reply.settings[:]
    reply.settings.extend(chosen)
    if arguments.toml:
        return Output("\n".join(_toml(reply)), reply)
    rows = [
        [_name(each), each.written, each.in_force, "command line" if each.origin == "--set" else each.origin]
        for each in chosen
    ]
    text = render_table(_COLUMNS, rows, empty="every setting is at its default")
    return Output("\n".join([text, *_waiting(reply)]), reply)


def _check(names: Iterable[str], settings: Iterable[wire.SettingStatus]) -> None:
    """Raise CommandError for a name that no setting has."""
    known = sorted({part for each in settings for part in (each.section, _name(each))})
    for name in names:
        if not any(_is_part(full, name) for full in known):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "`kvctl config` lists all"
            raise CommandError(USAGE, f"config: no setting {name!r}; {hint}")


def _is_part(full: str, name: str) -> bool:
    return full == name or full.startswith(f"{name}.")


def _name(setting: wire.SettingStatus) -> str:
    return ".".join(filter(None, (setting.section, setting.tenant, setting.key)))


def _waiting(reply: wire.ConfigReply) -> Iterator[str]:
    for each in reply.settings:
        if each.waiting:
            yield f"{_name(each)} waits for a restart: the file says {each.waiting}"
    if reply.tenants_waiting:
        yield f"[[tenant]] waits for a restart: the file says {reply.tenants_waiting}"


def _toml(reply: wire.ConfigReply) -> Iterator[str]:
    """Yield the lines of a configuration file with which the daemon starts as it runs now."""
    source = "the built-in defaults" if reply.source == "defaults" else reply.source
    yield f"# The settings of a running kvstored: those of {source}, and of its command line."
    table = ""
    for each in reply.settings:
        heading = f"[[{each.section}]]" if each.tenant else f"[{each.section}]"
        if f"{heading}{each.tenant}" != table:
            table = f"{heading}{each.tenant}"
            yield f"\n{heading}"
        yield f"{each.key} = {each.written}"
