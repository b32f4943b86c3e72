"""The invariant walker of residency: recounts everything from the rows and says what does not agree.

Used as the teardown of tests, by the daemon when idle and by `kvstored check`. Reads only; O(rows).
"""

from __future__ import annotations

from kvstored.lifecycle import INDEXED, READABLE, CopyState
from kvstored.residency.view import ResidencyView


def check(residency: ResidencyView) -> list[str]:
    """Broken invariants in words; empty when all hold."""
    faults: list[str] = []
    live = _check_rows(residency, faults)
    _check_tenants(residency, live, faults)
    for tier in range(len(residency.tiers)):
        _check_tier(residency, tier, live, faults)
    for row, pins in residency.pins.items():
        if row not in live or pins < 1:
            faults.append(f"row {row}: {pins} pins on a row that is {'live' if row in live else 'free'}")
    return faults


def _check_rows(residency: ResidencyView, faults: list[str]) -> set[int]:
    rows = residency.rows
    live = {row for row, key in enumerate(rows.keys) if key is not None}
    if len(live) != rows.live:
        faults.append(f"{rows.live} rows counted, {len(live)} live")
    links = dict.fromkeys(live, 0)
    for row in live:
        parent = rows.parent[row]
        if parent < 0:
            continue
        if parent not in live:
            faults.append(f"row {row}: parent {parent} is free")
        else:
            links[parent] += 1
            if residency.tenant_of(parent) != residency.tenant_of(row):
                faults.append(f"row {row}: parent {parent} belongs to another tenant")
    for row in live:
        if links[row] != rows.links[row]:
            faults.append(f"row {row}: {rows.links[row]} children counted, {links[row]} found")
        states = {copies.state[row] for copies in residency.copies}
        if states == {0} and not links[row]:
            faults.append(f"row {row}: neither copy nor child")
        if not states <= {0, *INDEXED}:
            faults.append(f"row {row}: copy states {sorted(states)} do not belong in the index")
        mask = sum(1 << tier for tier, copies in enumerate(residency.copies) if copies.state[row] in READABLE)
        if mask != rows.mask[row]:
            faults.append(f"row {row}: tier mask {rows.mask[row]:b}, states say {mask:b}")
        filling = sum(1 << t for t, copies in enumerate(residency.copies) if copies.state[row] == CopyState.FILLING)
        if filling != rows.filling[row]:
            faults.append(f"row {row}: filling mask {rows.filling[row]:b}, states say {filling:b}")
    return live


def _check_tenants(residency: ResidencyView, live: set[int], faults: list[str]) -> None:
    seen: set[int] = set()
    for number, index in enumerate(residency.tenants):
        for name, readable, part in (
            ("readable", True, index.readable),
            ("unreadable", False, index.unreadable),
        ):
            for key, row in part.items():
                if row not in live or residency.rows.keys[row] != key or row in seen:
                    faults.append(f"tenant {index.name}: {name} key {key.hex()} names row {row}, which is not its own")
                elif residency.tenant_of(row) != number or bool(residency.rows.mask[row]) != readable:
                    faults.append(f"tenant {index.name}: row {row} is listed as {name} and is not")
                seen.add(row)
    for row in live - seen:
        faults.append(f"row {row}: in no tenant's index")


def _check_tier(residency: ResidencyView, tier: int, live: set[int], faults: list[str]) -> None:
    copies, name = residency.copies[tier], residency.tiers[tier]
    held = [0] * len(residency.tenants)
    leaving = [0] * len(residency.tenants)
    kids = dict.fromkeys(live, 0)
    places: dict[tuple[int, int], int] = {}
    blocks = 0
    for row, state in enumerate(copies.state):
        if not state:
            continue
        if row not in live:
            faults.append(f"{name}: free row {row} has a copy")
            continue
        blocks += 1
        slot = copies.slot(row)
        held[residency.tenant_of(row)] += slot.nbytes
        leaving[residency.tenant_of(row)] += slot.nbytes if state == CopyState.DRAINING else 0
        other = places.setdefault((slot.container, slot.offset), row)
        if other != row:
            faults.append(f"{name}: rows {other} and {row} share the slot {slot.container}:{slot.offset}")
        parent = residency.rows.parent[row]
        if parent >= 0 and state in (CopyState.FILLING, CopyState.RESIDENT):
            kids[parent] = kids.get(parent, 0) + 1
    for row in live:
        if kids[row] != copies.kids[row]:
            faults.append(f"{name}: row {row}: {copies.kids[row]} children counted here, {kids[row]} found")
    if (held, leaving) != (copies.bytes_by_tenant, copies.leaving_by_tenant):
        faults.append(f"{name}: bytes by tenant {copies.bytes_by_tenant} counted, {held} found, {leaving} leaving")
    if blocks != copies.blocks:
        faults.append(f"{name}: {copies.blocks} copies counted, {blocks} found")
