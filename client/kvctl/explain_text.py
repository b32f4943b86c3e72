"""What kvctl explain says, in sentences and a table. Pure: replies in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvctl.show import KEY_DIGITS
from kvstore_console.table import render_table
from kvstore_console.units import human_blocks, human_count, human_seconds
from kvstore_proto.v1 import admin_pb2 as wire

_SENTENCES: Final[Mapping[str, str]] = {
    "never_stored": "never stored (or so long ago that the daemon has forgotten; a restart forgets too)",
    "evicted": "evicted for want of room",
    "expired": "expired: idle for longer than its tier's ttl_s, or worth less than host.keep_worth",
    "quota": "evicted because its tenant was at its own maximum",
    "other_fingerprint": "nothing is stored under this fingerprint, but under another one of the same model",
    "corrupt": "its bytes on NVMe failed verification; they are quarantined and the block is to be computed again",
    "invalidated": "an operator invalidated its fingerprint",
    "dropped": "deleted by its owner or dropped by an operator",
    "forgotten": "the tier below NVMe that had it, which may forget, has it no more",
    "read_failed": "the tier below DRAM would not give it: it could not be read, or the tier is shed (`kvctl status`)",
    "no_room": "its put was refused: DRAM was full, and nothing in it might be evicted (give the host tier more "
    "capacity, or hold fewer leases)",
    "over_quota": "its put was refused: its tenant was at its maximum, and none of its blocks might be evicted (raise "
    "the tenant's host_max, or hold fewer leases)",
    "declined": "its put was declined: the policy thought it worth less than what would have had to go (nothing to do)",
    "late": "stored, but not brought to DRAM before the deadline",
}
# Why a stored block is not on NVMe.
_VOLATILE: Final[Mapping[str, str]] = {
    "admission": "volatile: not worth a write yet, it was used once (nvme.admission)",
    "worth": "volatile: chains like its own do not bring enough to be worth a write (nvme.admission)",
    "scarce": "volatile: the endurance budget is scarce, and it was used once",
    "budget": "volatile: the endurance budget was spent (nvme.endurance_bytes_per_day)",
    "share": "volatile: the endurance budget is scarce, and its tenant has had its portion",
    "tier": "volatile: NVMe was degraded and took no writes",
    "behind": "volatile: the disk was too far behind with writing",
    "room": "volatile: NVMe had no room, and nothing there might leave",
    "write-failed": "volatile: writing it failed; the daemon's log says why",
    "other-tenant": "volatile: NVMe has a block of this key for another tenant",
    "pending": "on its way to NVMe",
    "not-asked": "volatile: its put did not ask for more, or its copy on NVMe had to make room since",
}
_COLUMNS: Final = (
    ">BLOCK", "KEY", "STATE", "TIERS", "CLASS", "DURABILITY", ">USES", ">IDLE", ">AGE", ">LEASES", ">CHILDREN", ">LOAD",
    "WHY",
)  # fmt: skip
_MISSES: Final = (
    ">AGO", "TENANT", "CLIENT", ">PID", "REQUEST", ">FOUND", "MISSING KEY", "CAUSE", ">TIMES", "MODEL",
)  # fmt: skip


def in_words(reason: str) -> str:
    """Why blocks were not served, for people; a reason without a sentence as it is."""
    return _SENTENCES.get(reason, reason)


def render_chain(
    label: str,
    blocks: Sequence[wire.BlockExplanation],
    usable: int,
    load_us: int,
    elsewhere: Sequence[Mapping[str, Any]],
) -> str:
    lines = [_summary(label, blocks, usable, load_us)]
    lines += [
        f"stored under another fingerprint: {item['label']} has {item['stored_blocks']} of {item['blocks']} blocks of "
        "these tokens"
        for item in elsewhere
    ]
    rows: list[list[str]] = []
    for number, block in enumerate(blocks):
        cells = _cells(block)
        if rows and block.state == "missing" and cells[2:] == rows[-1][3:]:
            rows[-1][0] = f"{rows[-1][0].split('-')[0]}-{number}"  # a run of blocks with one fate is one line
        else:
            rows.append([str(number), *cells])
    return "\n".join([*lines, render_table(_COLUMNS, rows, empty="no blocks")])


def reason_text(block: wire.BlockExplanation) -> str:
    """One sentence for a block that a get cannot have; empty for one that it can."""
    if block.state == "filling":
        return "it is being written"
    if block.state == "stored":
        return (
            f"not reached: {block.missing_ancestor[:KEY_DIGITS]} before it is missing" if block.missing_ancestor else ""
        )
    text = in_words(block.cause)
    if block.gone_s:
        text += f", {human_seconds(block.gone_s)} ago"
    if block.accesses_before:
        text += f", after {human_count(block.accesses_before)} use{'' if block.accesses_before == 1 else 's'}"
    if block.continued:
        text += "; stored blocks still continue it"
    return text


def _short_reason(block: wire.BlockExplanation) -> str:
    if block.state == "stored" and not block.missing_ancestor and block.volatile_because:
        return _VOLATILE.get(block.volatile_because, f"volatile: {block.volatile_because}")
    if block.state != "missing":
        return reason_text(block)
    return block.cause.replace("_", " ") + (f" {human_seconds(block.gone_s)} ago" if block.gone_s else "")


def render_misses(reply: wire.ExplainReply) -> str:
    rows = [
        [
            human_seconds(miss.ago_s), miss.tenant, miss.client, str(miss.pid), miss.request,
            f"{miss.found_blocks} of {miss.asked_blocks}", miss.key, miss.cause, human_count(miss.times),
            miss.fingerprint,
        ]
        for miss in reply.misses
    ]  # fmt: skip
    return render_table(_MISSES, rows, empty="nothing was missed since the daemon started")


def _summary(label: str, blocks: Sequence[wire.BlockExplanation], usable: int, load_us: int) -> str:
    if all("host" in block.block.tiers for block in blocks[:usable]):
        cost = "in DRAM"
    else:
        cost = f"reading what is not in DRAM would take about {human_seconds(load_us / 1e6)}"
    if usable == len(blocks):
        return f"{label}: {'the block is' if usable == 1 else f'all {human_blocks(usable)} are'} stored, {cost}"
    reason = f"block {usable}: {reason_text(blocks[usable])}"
    if not usable:
        return f"{label}: a get finds nothing; {reason}"
    return f"{label}: a get finds {human_count(usable)} of {human_blocks(len(blocks))}, {cost}; {reason}"


def _cells(explained: wire.BlockExplanation) -> list[str]:
    block = explained.block
    head = [explained.key[:KEY_DIGITS], explained.state]
    if explained.state != "stored":
        return [*head, *["-"] * 9, _short_reason(explained)]
    classes = dict.fromkeys(copy.residency for copy in explained.copies if copy.residency)
    age = human_seconds(explained.age_s) if explained.has_age else "-"
    return [
        *head, "+".join(block.tiers), "+".join(classes), block.durability, human_count(block.accesses),
        human_seconds(block.idle_s), age, human_count(block.leases), human_count(block.children),
        human_seconds(explained.load_us / 1e6), _short_reason(explained),
    ]  # fmt: skip
