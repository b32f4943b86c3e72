"""Counts by tenant and account: bounded, and no tenant takes the places of another's accounts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvstored.lifecycle import Cause
from kvstored.telemetry import Flows
from kvstored.telemetry.flows import MAX_ACCOUNTS


def _caller(tenant: int, account: str) -> Any:
    return SimpleNamespace(tenant_id=tenant, account=account)


def test_a_tenant_with_too_many_accounts_takes_no_place_of_anothers() -> None:
    flows = Flows(2)
    for number in range(MAX_ACCOUNTS + 3):
        flows.looked_up(_caller(0, f"made up {number}"))
    flows.found(_caller(1, "anna"), 3)
    flows.missed(_caller(1, "anna"), Cause.NEVER_STORED, 2)
    flows.looked_up(_caller(1, ""))
    assert (len(flows.accounts[0]), len(flows.accounts[1])) == (MAX_ACCOUNTS, 1)
    assert flows.tenants[0].lookups == MAX_ACCOUNTS + 3
    anna = flows.accounts[1]["anna"]
    assert (anna.lookups, anna.hit_blocks, anna.missed_blocks) == (0, 3, 2)
    assert (flows.tenants[1].lookups, flows.tenants[1].hit_blocks, flows.misses[Cause.NEVER_STORED]) == (1, 3, 2)
