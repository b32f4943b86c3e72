"""The places of blocks, read from the tenant's lookup index in shared memory without a round trip.

The module owns the mapping of the index of one daemon session, and the request for it. An answer of the index is a hint
that may be old when it is used. Bytes are read through a lease alone, whose headers are verified, so a wrong answer
costs a miss at worst. Only the first probe of a session waits, briefly. Invariant: an uncertain answer (no index, a
bucket that overflowed, is being written or is damaged) is "unknown", never "absent".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstore_client.handshake import GrantedIndex
from kvstore_client.memory import map_read_only
from kvstore_client.results import REASON_ABSENT, REASON_UNKNOWN, TIER_NAMES, UNKNOWN_TIER, Lookup
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import BlockKeys
from kvstore_proto.lookup_index import ABSENT, UNKNOWN, IndexLayout, IndexState, find, read_layout, read_state
from kvstore_proto.matching import match_of, restorable_blocks

FIRST_WAIT_S = 0.02  # of the first probe, for the daemon to hand the index over; it takes 0.2 ms
RETRY_S = 5.0  # after the daemon said that there is none
_NAMES = (*TIER_NAMES, *(UNKNOWN_TIER,) * (256 - len(TIER_NAMES)))  # by tier code


class LookupIndex:
    """The lookup index of one daemon session, mapped to read. It is a table in shared memory that says in which tier a
    block is. `raw` is its memory, which the daemon writes meanwhile, and `layout` describes it.
    """

    def __init__(self, raw: memoryview, layout: IndexLayout) -> None:
        self.layout = layout
        self._raw = raw
        self._mask = layout.buckets - 1

    def codes(self, keys: BlockKeys) -> list[int]:
        """Return, for each of `keys`, the number of the tier that has the block, ABSENT, or UNKNOWN if the index cannot
        say.
        """
        raw, mask, seed = self._raw, self._mask, self.layout.seed
        before = read_state(raw)
        found = [find(raw, mask, seed, key) for key in keys]
        state = min(before, read_state(raw))
        if state == IndexState.SERVING:
            return found
        if state == IndexState.BUILDING:  # what is there is there; the rest may not be entered yet
            return [code or UNKNOWN for code in found]
        return [UNKNOWN] * len(found)


def map_index(grant: GrantedIndex) -> LookupIndex | str:
    """Map the lookup index that the daemon granted, and return it. If this client cannot use it, return a sentence that
    says why. The descriptor of `grant` is closed in any case.
    """
    if grant.descriptor < 0:
        return grant.reason or "the daemon handed over no index"
    try:
        raw = map_read_only(grant.descriptor, grant.size_bytes).data
    except (OSError, ValueError) as error:
        return f"the lookup index cannot be mapped: {error}"
    layout = read_layout(raw)
    return layout if isinstance(layout, str) else LookupIndex(raw, layout)


class IndexSource:
    """A holder of one session's lookup index, which requests the index from the daemon when it is first needed.
    `request(timeout_s)` returns the daemon's grant, or None if there is no answer yet. If `request` is None, the daemon
    offers no index, and `get` always returns None. `clock` returns seconds.
    """

    def __init__(
        self, request: Callable[[float], GrantedIndex | None] | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._request = request
        self._clock = clock
        self._index: LookupIndex | None = None
        self._waits = True
        self._not_before = 0.0
        self.reason = "" if request is not None else "this daemon offers no lookup index"

    @property
    def mapped(self) -> LookupIndex | None:
        """The lookup index if it is mapped already, or None."""
        return self._index

    def get(self, *, may_wait: bool) -> LookupIndex | None:
        """Return the lookup index, or None if it cannot be had now. With `may_wait`, the first call waits up to 20 ms
        for the daemon; no other call waits.
        """
        if self._index is not None or self._request is None or self._clock() < self._not_before:
            return self._index
        timeout_s = FIRST_WAIT_S if may_wait and self._waits else 0.0
        self._waits = self._waits and not may_wait
        grant = self._request(timeout_s)
        if grant is None:
            return None
        mapped = map_index(grant)
        if isinstance(mapped, str):
            self.reason = mapped
            self._not_before = self._clock() + RETRY_S
            return None
        self._index = mapped
        return mapped


def probe(index: LookupIndex | None, keys: BlockKeys, fingerprint: Fingerprint, group: LayerGroup) -> Lookup:
    """Return what the lookup index `index` says about the blocks of `keys`, which form a prefix in `group` of
    `fingerprint`. Nothing is asked of the daemon. `reason` of the result is "", "absent", or "unknown" if only the
    daemon knows.
    """
    if index is None:
        return Lookup(tiers=(UNKNOWN_TIER,) * len(keys), reason=REASON_UNKNOWN if keys.packed else "")
    codes = index.codes(keys)
    window = group.window_blocks(fingerprint.block_tokens)
    blocks = usable_blocks([code != ABSENT and code != UNKNOWN for code in codes], group.kind, window)
    reason = ""
    if blocks < len(codes):
        reason = REASON_ABSENT
        if UNKNOWN in codes and usable_blocks([code != ABSENT for code in codes], group.kind, window) != blocks:
            reason = REASON_UNKNOWN
    return Lookup(blocks, blocks * fingerprint.block_tokens, tuple([_NAMES[code] for code in codes]), reason=reason)


def usable_blocks(present: Sequence[bool], kind: str, window_blocks: int) -> int:
    """Return the largest number of leading blocks after which a layer group of this `kind` can resume, by the rule that
    the daemon uses too. `present` says for each block of the prefix whether it is stored; `window_blocks` is the length
    of a sliding window in blocks.
    """
    return restorable_blocks(present, match_of(kind), window_blocks)
