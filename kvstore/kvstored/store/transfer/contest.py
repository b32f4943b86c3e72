"""The contest for a place in a full tier before DRAM: a block is copied there only if it was used more often than the
one that would leave for it.

Admission by comparison with the victim is TinyLFU's (Einziger, Friedman, Manes, ACM TOS 13(4), 2017). Uses are those
that residency has counted, over evictions too, and not a sketch's: nothing is done at a use. What was popular once must
give way all the same, so a victim loses in any case once the tier has declined `_TURNOVERS` times its own blocks
since the last use of the victim that was seen here. Without the contest a set of blocks that are used in turn, larger
than the tier, is copied there over and over, and hardly one is read from it. Asks residency, changes nothing there.
"""

from __future__ import annotations

from kvstored.store.blocks import ResidencyView

_TURNOVERS = 8
_NOTES_MAX = 4096  # victims that won; without its note a victim stays longer


class Contest:
    """For places in the tier at position `tier`."""

    def __init__(self, residency: ResidencyView, tier: int) -> None:
        self._residency = residency
        self._tier = tier
        self._declined = 0  # blocks
        self._won: dict[int, tuple[int, int]] = {}  # by token: its last use, and `_declined` when that was first seen

    def wins(self, row: int, victim: int, blocks: int = 1) -> bool:
        """Whether `row` takes the place of `victim`. If not, `blocks` are declined: it and those that need it."""
        residency = self._residency
        token, last_use_ns = residency.token(victim), residency.rows.last_access_ns[victim]
        seen_ns, declined = self._won.pop(token, (-1, self._declined))
        if seen_ns != last_use_ns:
            declined = self._declined
        is_stale = self._declined - declined > _TURNOVERS * residency.tier_blocks(self._tier)
        if is_stale or residency.accesses(row) > residency.accesses(victim):
            return True
        self._won[token] = last_use_ns, declined
        if len(self._won) > _NOTES_MAX:
            del self._won[next(iter(self._won))]
        self._declined += blocks
        return False
