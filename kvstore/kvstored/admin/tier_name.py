"""A tier by the name that an operator gives."""

from __future__ import annotations

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstored.store.blocks import Residency


def tier_named(residency: Residency, name: str) -> int:
    """Its position. Raises KVStoreError, naming those that there are, for another name."""
    if name not in residency.tiers:
        known = ", ".join(residency.tiers)
        raise KVStoreError(ErrorKind.INVALID, f"no tier {name!r}; this daemon has: {known}")
    return residency.tier(name)
