"""The control thread's part: each change of where a block can be read becomes a record. It neither encodes nor sends.

Owns which blocks the publisher knows, and with or without their token ids. Invariant: after `announce_all` has run to
its end, the publisher's model has what residency has, but for records that wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from kvstore_proto.arena import MAX_TOKENS, TOKEN_COUNT_OFFSET, TOKENS_OFFSET
from kvstore_tiers.base import Tier
from kvstored.events.records import CHANGED, CHANGED_HEAD, RESET, STORED, STORED_HEAD, pack_kind
from kvstored.store.blocks import Residency

ROWS_A_SLICE = 2000  # some 2 ms of the control thread
UNKNOWN, KNOWN, WITH_TOKENS = 0, 1, 2
KindText = Callable[[int], tuple[bytes, int] | None]


class EventFeed:
    """A presence listener. `kind_text` gives a row kind's topic and its tokens a block; None: not published. `append`
    takes records. `tiers`: by position; those in memory are where token ids are read; none where they are private."""

    def __init__(
        self,
        residency: Residency,
        tiers: Sequence[Tier],
        kind_text: KindText,
        append: Callable[[bytes], object],
        schedule: Callable[[Callable[[], None]], object],
    ) -> None:
        self._residency = residency
        self._tiers = tiers
        self._readable = sum(1 << position for position, tier in enumerate(tiers) if tier.info.is_in_memory)
        self._kind_text = kind_text
        self._append = append
        self._schedule = schedule
        self._known = bytearray()  # by row
        self._kinds: dict[int, bool] = {}  # the publisher knows them; whether it is to
        self._round = 0  # of announcing everything

    def changed(self, tenant: int, key: bytes, mask: int, row: int) -> None:
        """See `PresenceListener`."""
        rows = self._residency.rows
        kind = rows.kind[row]
        if not self._kinds.get(kind) and not self._learn(kind):
            return
        if row >= len(self._known):
            self._known.extend(bytes(rows.capacity - len(self._known)))
        known = self._known[row]
        if not mask:
            if known:
                self._known[row] = UNKNOWN
                self._append(CHANGED_HEAD.pack(CHANGED, 0, kind, key))
        elif known == WITH_TOKENS or (known and not mask & self._readable):
            self._append(CHANGED_HEAD.pack(CHANGED, mask, kind, key))
        else:
            tokens = self._tokens(row, mask)
            self._known[row] = WITH_TOKENS if mask & self._readable else KNOWN
            parent = self._residency.parent_key(row)
            self._append(STORED_HEAD.pack(STORED, mask, kind, key, parent, len(tokens) // 4) + tokens)

    def announce_all(self) -> None:
        """Let the publisher forget what it knows, and announce everything, a slice at a time; changes meanwhile are
        announced as they happen."""
        self._round += 1
        self._known = bytearray(self._residency.rows.capacity)
        self._kinds.clear()
        self._append(bytes([RESET]))
        self._announce(0, self._round)

    def _announce(self, first: int, number: int) -> None:
        if number != self._round:
            return
        rows = self._residency.rows
        end = min(first + ROWS_A_SLICE, rows.capacity)
        for row in range(first, end):
            mask = rows.mask[row]
            if mask and not (row < len(self._known) and self._known[row]):
                self.changed(self._residency.tenant_of(row), self._residency.key(row), mask, row)
        if end < rows.capacity:
            self._schedule(lambda: self._announce(end, number))

    def _learn(self, kind: int) -> bool:
        """Whether blocks of this kind are published; the publisher hears of it first."""
        if kind not in self._kinds:
            text = self._kind_text(kind)
            self._kinds[kind] = text is not None
            if text is not None:
                topic, block_tokens = text
                self._append(pack_kind(kind, block_tokens, self._residency.kinds[kind].group, topic))
        return self._kinds[kind]

    def _tokens(self, row: int, mask: int) -> bytes:
        """The token ids in the header of a copy in memory, packed; empty where there is none."""
        mask &= self._readable
        if not mask:
            return b""
        position = (mask & -mask).bit_length() - 1
        address = self._tiers[position].slot_segment(self._residency.slot(row, position)).address
        count = int.from_bytes(ctypes.string_at(address + TOKEN_COUNT_OFFSET, 4), "little")
        return ctypes.string_at(address + TOKENS_OFFSET, 4 * count) if count <= MAX_TOKENS else b""
