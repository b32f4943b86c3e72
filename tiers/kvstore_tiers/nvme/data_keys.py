"""The contract of who has the keys of encrypted blocks, and the answer of a node without any.

It needs no package of an extra; `seals.py`, which encrypts, is loaded where there are keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvstore_tiers.nvme.seals import DataKey


class DataKeys(Protocol):
    """The keys of a node's tenants. Any thread may call. `are_complete`: a key that is not here was destroyed, and what
    it encrypted is lost for good."""

    are_complete: bool

    def of_tenant(self, digest: bytes) -> DataKey | None:
        """Return the key for new blocks of the tenant with this `digest`; None for a tenant whose blocks are not
        encrypted. Raises OSError when a new key cannot be saved."""

    def numbered(self, number: bytes) -> DataKey | None:
        """Return the key with this `number`, 8 bytes; None when it is not here."""


class NoDataKeys(DataKeys):
    """The keys of a node that encrypts nothing. With `are_complete` its encrypted blocks are lost."""

    def __init__(self, *, are_complete: bool) -> None:
        self.are_complete = are_complete

    def of_tenant(self, digest: bytes) -> DataKey | None:
        return None

    def numbered(self, number: bytes) -> DataKey | None:
        return None
