"""One lease of several, each on the blocks that follow its forerunner's: a prefix that took several requests.

Owns the join alone: what was granted stays with the parts. Invariant: the whole is valid only while every part is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore_client.keys import Chain
from kvstore_client.lease import Grant, Lease
from kvstore_proto.token_ids import TokenIds


class JoinedGrant:
    """The grants of several leases of one layer group. Implements `Grant`."""

    def __init__(self, grants: Sequence[Grant]) -> None:
        self._grants = grants
        self.block_tokens = grants[0].block_tokens
        self.layer_count = grants[0].layer_count

    def is_alive(self) -> bool:
        return all(grant.is_alive() for grant in self._grants)

    def renew(self) -> float | None:
        """Renew one after the other: the first one's time passes meanwhile, the daemon's answers are that short."""
        shortest: float | None = None
        for grant in self._grants:
            expires_in_s = grant.renew()
            if expires_in_s is None:
                return None
            shortest = expires_in_s if shortest is None else min(shortest, expires_in_s)
        return shortest

    def release(self) -> None:
        for grant in self._grants:
            grant.release()

    def chain(self, tokens: TokenIds) -> Chain:
        return self._grants[0].chain(tokens)


def joined(parts: Sequence[Lease], clock: Callable[[], float]) -> Lease:
    """Return one lease that has the blocks of all `parts`, and their release: they are not to be used any more."""
    if len(parts) == 1:
        return parts[0]
    held = [part for part in parts if len(part)]
    whole = Lease(
        [block for part in held for block in part.held_blocks],
        JoinedGrant([part.grant for part in held if part.grant is not None]) if held else None,
        reason=parts[-1].reason,
        promoted_bytes=sum(part.promoted_bytes for part in parts),
        resident_blocks=sum(part.resident_blocks for part in parts),
        estimated_load_s=sum(part.estimated_load_s for part in parts),
        clock=clock,
    )
    whole.valid_until = min((part.valid_until for part in held), default=0.0)
    return whole
