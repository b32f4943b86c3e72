"""How an engine's hint reaches the policies: in one way, from a daemon's clients and from a recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvstored.store.blocks import ResidencyView
from kvstored.store.policies.base import ChainHint, Policy

_NOTHING = ChainHint()


def deliver_hint(
    policies: Sequence[Policy],
    residency: ResidencyView,
    tenant: int,
    key: bytes,
    rows: Sequence[int],
    hint: ChainHint,
    now_ns: int,
) -> None:
    """`hint` is of the chain that ends with block `key`; of a request that is due, down to the last of `rows`, the
    leading run of the chain that is stored: a queued prompt ends with blocks that are new.
    """
    of_the_end = replace(hint, due_ns=None)
    if of_the_end != _NOTHING:
        row = residency.find(tenant, key)
        for policy in policies:
            policy.on_hint(tenant, row, key, of_the_end, now_ns)
    if hint.due_ns is not None and rows:
        for policy in policies:
            policy.on_hint(tenant, rows[-1], residency.key(rows[-1]), ChainHint(due_ns=hint.due_ns), now_ns)
