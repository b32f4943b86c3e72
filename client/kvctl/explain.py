"""kvctl explain: where each block of a chain is and what a get of it would cost, or why it is missing.

A session of the command turns tokens and names into keys. No block is looked up, read or moved, so explaining a block
does not change it. If tokens are stored under other fingerprints, the output names these.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvctl.blocks import with_terms
from kvctl.connection import Ask, explain_source, in_words, open_session
from kvctl.output import KEY_DIGITS, UNREACHABLE, USAGE, CommandError, Output, plain
from kvctl.target import Target, find_target, fingerprint_digits, read_fingerprint
from kvstore_client.session import Session
from kvstore_console.table import render_table
from kvstore_console.units import human_blocks, human_count, human_seconds
from kvstore_proto.fingerprint import Fingerprint, parse_fingerprint
from kvstore_proto.identity import BlockKeys
from kvstore_proto.matching import boundaries, longest_common, match_of
from kvstore_proto.objects import object_tokens
from kvstore_proto.v1 import explain_pb2 as wire

PAGE_KEYS: Final = 1024
OBJECT_PAGE_BLOCKS: Final = 64
MAX_OTHER_FINGERPRINTS: Final = 32
_KEY: Final = re.compile("[0-9a-fA-F]{6,32}")
STORED, MISSING = "stored", "missing"
NEVER_STORED, OTHER_FINGERPRINT = "never_stored", "other_fingerprint"
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
    ">AGO", "TENANT", "CLIENT", ">PID", "REQUEST", ">FOUND", "MISSING KEY", "GROUP", "CAUSE", ">TIMES", "MODEL",
)  # fmt: skip


def explain(directory: Path, arguments: argparse.Namespace) -> Output:
    with explain_source(directory, arguments.timeout) as ask:
        if arguments.recent is not None:
            request = wire.ExplainRequest(recent_misses=arguments.recent, tenant=arguments.tenant)
            reply = ask(request)
            return Output(render_misses(reply), {"misses": [plain(miss) for miss in reply.misses]})
        if arguments.keys:
            return _explain_keys(directory, ask, arguments)
        target = find_target(directory, arguments)
        with open_session(directory, target.fingerprint, arguments.timeout) as session:
            if target.name is not None:
                return _explain_object(ask, session, target)
            return _explain_prefix(directory, ask, session, target, arguments.timeout)


def _explain_keys(directory: Path, ask: Ask, arguments: argparse.Namespace) -> Output:
    fingerprint = arguments.fingerprint or ""
    if Path(fingerprint).is_file():
        fingerprint = read_fingerprint(directory, arguments).digest().hex()
    elif fingerprint:
        fingerprint = fingerprint_digits(fingerprint)
    wrong = next((key for key in arguments.keys if not _KEY.fullmatch(key)), None)
    if wrong is not None:
        raise CommandError(USAGE, f"explain: a key is 32 hex digits, or its first 6 or more, got {wrong!r}")
    request = wire.ExplainRequest(
        keys=arguments.keys, tenant=arguments.tenant, fingerprint=fingerprint, ancestors=len(arguments.keys) == 1
    )
    reply = ask(request)
    label = arguments.keys[0] if len(arguments.keys) == 1 else f"{len(arguments.keys)} keys"
    return _output(label, list(reply.blocks))


def _explain_object(ask: Ask, session: Session, target: Target) -> Output:
    """Explain the blocks of an object. The number of blocks is in the first block, which is not read; so pages are
    asked for until a page ends with a block that was never stored.
    """
    assert target.name is not None
    blocks: list[wire.BlockExplanation] = []
    while True:
        more = min(max(len(blocks), OBJECT_PAGE_BLOCKS), PAGE_KEYS)
        tokens = object_tokens(target.name, len(blocks) + more)
        page = _ask(ask, session, target, _keys(session, tokens, target)[len(blocks) :])
        blocks += page
        if _is_unknown(page[-1]):
            break
    while len(blocks) > 1 and _is_unknown(blocks[-1]):
        blocks.pop()
    return _output(target.label, blocks)


def _explain_prefix(directory: Path, ask: Ask, session: Session, target: Target, timeout_s: float) -> Output:
    assert target.tokens is not None
    of_each = {
        group.group_id: _ask(ask, session, other, _keys(session, target.tokens, other))
        for group in target.fingerprint.groups
        for other in (replace(target, group=group.group_id),)
    }
    blocks = of_each[target.group]
    elsewhere: list[dict[str, Any]] = []
    if any(_is_unknown(block) for block in blocks):
        elsewhere = _elsewhere(directory, ask, session, target, timeout_s)
    return _output(target.label, blocks, elsewhere, _resume(target.fingerprint, of_each))


def _resume(fingerprint: Fingerprint, of_each: Mapping[int, Sequence[wire.BlockExplanation]]) -> dict[str, Any]:
    """Return where all layer groups can resume, and the group that ended it with the reason."""
    tokens, groups, maps = fingerprint.block_tokens, fingerprint.groups, list[int]()
    for group in groups:
        present = [block.state == STORED for block in of_each[group.group_id]]
        maps.append(boundaries(present, match_of(group.kind), group.window_blocks(tokens)))
    blocks, ended = longest_common(maps, len(of_each[groups[0].group_id]))
    found: dict[str, Any] = {"blocks": blocks, "tokens": blocks * tokens, "groups": len(groups)}
    found |= {"ended_by": None, "kind": "", "reason": ""}
    if ended is not None:
        missing = of_each[groups[ended].group_id][blocks]
        found |= {"ended_by": groups[ended].group_id, "kind": groups[ended].kind, "reason": reason_text(missing)}
        if not blocks and _is_unknown(missing):
            found["reason"] += f"; of a prefix shorter than one block of {tokens} tokens nothing is stored"
    return found


def _keys(session: Session, tokens: Any, target: Target) -> BlockKeys:
    keys = session.keys(tokens, target.group)
    if keys is None:
        raise CommandError(UNREACHABLE, "the daemon went away")
    return keys


def _ask(ask: Ask, session: Session, target: Target, keys: BlockKeys) -> list[wire.BlockExplanation]:
    blocks: list[wire.BlockExplanation] = []
    for start in range(0, len(keys), PAGE_KEYS):
        request = wire.ExplainRequest(
            keys=[key.hex() for key in keys[start : start + PAGE_KEYS]],
            tenant=session.tenant,
            fingerprint=target.fingerprint.digest().hex(),
        )
        blocks += ask(request).blocks
    return blocks


def _is_unknown(block: wire.BlockExplanation) -> bool:
    return block.state == MISSING and block.cause in (NEVER_STORED, OTHER_FINGERPRINT)


def _elsewhere(directory: Path, ask: Ask, session: Session, target: Target, timeout_s: float) -> list[dict[str, Any]]:
    """Return the other fingerprints of this tenant under which these tokens are stored."""
    listed = ask(wire.ExplainRequest(tenant=session.tenant)).fingerprints
    others = [item for item in listed if item.canonical and item.digest != target.fingerprint.digest().hex()]
    found: list[dict[str, Any]] = []
    for item in others[:MAX_OTHER_FINGERPRINTS]:
        fingerprint = parse_fingerprint(item.canonical.encode())
        other = Target(item.label, fingerprint, fingerprint.groups[0].group_id, tokens=target.tokens)
        if not other.blocks:
            continue
        with open_session(directory, fingerprint, timeout_s) as there:
            blocks = _ask(ask, there, other, _keys(there, other.tokens, other))
        stored = sum(block.state == STORED for block in blocks)
        if stored:
            found.append(
                {"fingerprint": item.digest, "label": item.label, "stored_blocks": stored, "blocks": len(blocks)}
            )
    return found


def _output(
    label: str,
    blocks: list[wire.BlockExplanation],
    elsewhere: Sequence[dict[str, Any]] = (),
    resume: Mapping[str, Any] | None = None,
) -> Output:
    usable = next((number for number, block in enumerate(blocks) if block.state != STORED), len(blocks))
    load_us = sum(block.load_us for block in blocks[:usable])
    first_missing = blocks[usable] if usable < len(blocks) else None
    reply = {
        "blocks": [plain(block) for block in blocks],
        "usable_blocks": usable,
        "load_us": load_us,
        "cause": first_missing.cause if first_missing is not None else "",
        "elsewhere": list(elsewhere),
    }
    if resume is not None:
        reply["resume"] = resume
    return Output(render_chain(label, blocks, usable, load_us, elsewhere, resume), reply)


def render_chain(
    label: str,
    blocks: Sequence[wire.BlockExplanation],
    usable: int,
    load_us: int,
    elsewhere: Sequence[Mapping[str, Any]],
    resume: Mapping[str, Any] | None = None,
) -> str:
    lines = [_summary(label, blocks, usable, load_us)]
    if resume is not None and resume["groups"] > 1:
        ended = f"; layer group {resume['ended_by']} ({resume['kind']}) ends it: {resume['reason']}"
        lines.append(
            f"an engine can resume behind {human_blocks(resume['blocks'])} ({human_count(resume['tokens'])} tokens)"
            + (ended if resume["ended_by"] is not None else "")
        )
    lines += [
        f"stored under another fingerprint: {item['label']} has {item['stored_blocks']} of {item['blocks']} blocks of "
        "these tokens"
        for item in elsewhere
    ]
    rows: list[list[str]] = []
    shown: list[wire.BlockStatus] = []
    for number, block in enumerate(blocks):
        cells = _cells(block)
        if rows and block.state == "missing" and cells[2:] == rows[-1][3:]:
            rows[-1][0] = f"{rows[-1][0].split('-')[0]}-{number}"  # a run of blocks with one fate is one line
        else:
            rows.append([str(number), *cells])
            shown.append(block.block)
    columns, rows = with_terms(_COLUMNS, rows, shown)
    return "\n".join([*lines, render_table(columns, rows, empty="no blocks")])


def reason_text(block: wire.BlockExplanation) -> str:
    """Return a sentence that explains why a get cannot return the block that `block` describes, or "" if it can."""
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
    if block.state == "stored" and block.block.spent and not block.missing_ancestor:
        return "no boundary needs it that is likely asked for: leaves first"
    if block.state != "missing":
        return reason_text(block)
    return block.cause.replace("_", " ") + (f" {human_seconds(block.gone_s)} ago" if block.gone_s else "")


def render_misses(reply: wire.ExplainReply) -> str:
    rows = [
        [
            human_seconds(miss.ago_s), miss.tenant, miss.client, str(miss.pid), miss.request,
            f"{miss.found_blocks} of {miss.asked_blocks}", miss.key, f"{miss.group} {miss.kind}".strip(), miss.cause,
            human_count(miss.times), miss.fingerprint,
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
