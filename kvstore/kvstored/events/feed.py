"""The control thread's part of events: it notes the row of each change, and a little later sends the state of the rows.

A put pays for an append; everything else is done for all rows of some milliseconds together, in columns. A block that
was stored and has left before is never sent. While the publisher cannot take more, rows wait; a row noted twice is sent
once.

The module owns which blocks the publisher knows, by row and generation, and with or without their token ids.
Invariants: a row whose state the publisher does not know waits in `_rows`; a block is sent after its parent, and after
the publisher has heard that another row does not have it any more.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore_proto.arena import MAX_TOKENS, TOKEN_COUNT_OFFSET, TOKENS_OFFSET
from kvstore_tiers.base import Tier
from kvstored.events.records import CHANGES, CHANGES_HEAD, RESET, pack_kind
from kvstored.store.blocks import Residency
from kvstored.store.blocks.rows import as_array
from kvstored.tier_set import NO_TIERS, TierSet, holding, holding_any

log = logging.getLogger(__name__)
DELAY_S = 0.1  # from the first change to sending it
ANEW_S = 60.0  # from a failure to announcing all again
ROWS_A_SLICE = 8192  # noted ones, twice where a row is used again: some millisecond of the control thread
ROWS_WITH_IDS = 1000  # of a slice whose token ids are read as well
LOOKED_A_SLICE = 8 * ROWS_A_SLICE  # that may be gone
ROWS_AT_LEAST = 1 << 16  # that wait before those that were noted twice are looked for
UNKNOWN, KNOWN, WITH_TOKENS = 0, 1, 2
KindText = Callable[[int], tuple[bytes, int] | None]
Numbers = npt.NDArray[np.int64]
_COUNT_AT, _IDS_AT = TOKEN_COUNT_OFFSET // 4, TOKENS_OFFSET // 4
Integers = npt.NDArray[np.integer]


class TokenColumns:
    """A reader of the token ids of many blocks at once, from the headers of the blocks' copies in memory. `tiers` are
    by position, and empty if token ids are private. Use it on the control thread, which gives no slot away meanwhile.
    Since clients may write some of this memory, an impossible count of tokens is read as none."""

    def __init__(self, residency: Residency, tiers: Sequence[Tier]) -> None:
        self._residency = residency
        self._tiers = tiers
        self.readable = TierSet.of(*(position for position, tier in enumerate(tiers) if tier.info.is_in_memory))

    def read(self, rows: Integers, masks: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint16], bytes]:
        """Return two values for the blocks at `rows`: an array (uint16) with the number of token ids of each, and all
        the token ids packed in this order. `masks` has the set of tiers of each row. A block without a copy in memory
        has no token ids."""
        counts = np.zeros(len(rows), np.uint16)
        left = masks.copy()
        parts: list[tuple[Integers, Integers, npt.NDArray[np.int32]]] = []  # which rows, their places, the memory
        for position in self.readable:
            here = np.flatnonzero(holding(left, position))
            if len(here):
                parts.extend(self._places(self._tiers[position], position, rows, here))
                left[here] = NO_TIERS
        for which, places, words in parts:
            found = words[places + _COUNT_AT]
            counts[which] = np.where((found >= 0) & (found <= MAX_TOKENS), found, 0)
        ends = np.cumsum(counts, dtype=np.int64)
        ids = np.empty(int(ends[-1]) if len(ends) else 0, np.int32)
        for which, places, words in parts:
            of_each = counts[which]
            for count in np.unique(of_each).tolist():
                same = slice(None) if of_each[0] == count and (of_each == count).all() else of_each == count
                numbers = np.arange(count)
                to = (ends[which[same]] - count)[:, None] + numbers
                ids[to] = words[(places[same] + _IDS_AT)[:, None] + numbers]
        return counts, ids.tobytes()

    def _places(
        self, tier: Tier, position: int, rows: Integers, here: Integers
    ) -> list[tuple[Integers, Integers, npt.NDArray[np.int32]]]:
        """Return, for the rows that `here` picks, the words of each container's memory, and the place of each slot in
        them.
        """
        copies, wanted = self._residency.copies[position], rows[here]
        containers = as_array(copies.container)[wanted]
        offsets = as_array(copies.offset)[wanted].astype(np.int64)
        found = []
        for container in np.unique(containers).tolist():
            mine = containers == container
            picked, begins = here[mine], offsets[mine]
            first = self._residency.slot(int(wanted[mine][0]), position)
            base = tier.slot_segment(first).address - first.offset  # slots of a container are in one piece of memory
            low, high = int(begins.min()), int(begins.max()) + TOKENS_OFFSET + 4 * MAX_TOKENS
            nbytes = 2 ** (high - low - 1).bit_length()  # few lengths: ctypes makes a type of each; none read so far
            memory = memoryview((ctypes.c_char * nbytes).from_address(base + low))
            found.append((picked, (begins - low) // 4, np.frombuffer(memory, np.int32)))
        return found


class Outlet(Protocol):
    """A receiver of messages. It keeps messages that come while it is not `ready`."""

    @property
    def ready(self) -> bool: ...

    def send(self, message: bytes) -> None: ...


class EventFeed:
    """The control thread's source of KV events (messages to routers): it notes which rows of the block index have
    changed, and sends their state to `outlet` a little later.

    `kind_text` returns the topic and the tokens a block of a row kind, or None if its blocks are not published. `tiers`
    are by position; token ids are read from those in memory, or from none if they are private. `call_later(seconds, f)`
    calls f on this thread."""

    def __init__(
        self,
        residency: Residency,
        tiers: Sequence[Tier],
        kind_text: KindText,
        outlet: Outlet,
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._residency = residency
        self._tokens = TokenColumns(residency, tiers)
        self._kind_text = kind_text
        self._outlet = outlet
        self._call_later = call_later
        self._rows = array("I")  # that wait, from `_taken` on
        self._taken = self._looked = 0  # of those before `_looked`, the publisher knows which are gone
        self._is_on = self._is_waiting = False  # changes are noted; `_flush` is to be called
        self._known = np.zeros(0, np.uint8)  # by row
        self._generation = np.zeros(0, np.uint32)  # of the block that is known
        self._place = np.zeros(0, np.int32)  # in the slice in hand, from 1; else 0
        self._published = np.zeros(0, np.uint8)  # by row kind

    @property
    def waiting_rows(self) -> int:
        """The number of changed rows that have been noted and not been sent."""
        return len(self._rows) - self._taken

    @property
    def _most_rows(self) -> int:
        """The number of noted rows that a slice has at most."""
        return ROWS_WITH_IDS if self._tokens.readable else ROWS_A_SLICE

    def announce_all(self) -> None:
        """Note changes from now on, have the receiver forget all blocks, and send it all stored blocks again."""
        rows = self._residency.rows
        self._known = np.zeros(rows.capacity, np.uint8)
        self._published = np.zeros(0, np.uint8)
        self._outlet.send(bytes([RESET]))
        self._learn_kinds()  # of which nothing may be stored any more, and subscribers may have blocks
        self._is_on = True
        self._wait_for(np.flatnonzero(np.frombuffer(rows.mask, np.uint8)))
        self._wake()

    def stop(self) -> None:
        """Note no more changes of blocks, and drop the changes that wait to be sent."""
        self._is_on = False
        self._residency.note_with(None)
        del self._rows[:]
        self._taken = self._looked = 0

    # What waits

    def _wait_for(self, rows: Numbers) -> None:
        """Let these rows wait, parents before children, in place of the waiting ones."""
        depth = as_array(self._residency.rows.depth)[rows]
        depth = np.minimum(depth, 0xFFFF).astype(np.uint16)  # which numpy sorts in a tenth of the time
        del self._rows[:]
        self._taken = self._looked = 0
        self._rows.frombytes(rows[np.argsort(depth, kind="stable")].astype(np.uint32).tobytes())

    def _wait_once(self) -> None:
        """Let rows that were noted twice wait once."""
        is_noted = np.zeros(self._residency.rows.capacity, np.bool_)  # sorting millions of rows would take seconds
        is_noted[np.frombuffer(self._rows[self._taken :], np.uint32)] = True
        self._wait_for(np.flatnonzero(is_noted))

    def _first(self, rows: Sequence[int]) -> None:
        self._rows.extend(rows)
        self._wake()

    def _wake(self) -> None:
        self._residency.note_with(self._rows.extend)
        if not self._is_waiting:
            self._is_waiting = True
            self._call_later(DELAY_S, self._flush)

    def _flush(self) -> None:
        """Send a slice of the waiting rows. A bug ends the events for a while, and nothing else: all blocks are
        announced again later.
        """
        self._is_waiting = False
        try:
            self._flush_slice()
        except Exception:
            log.exception("KV events could not be made; in %g s all blocks are announced again", ANEW_S)
            self.stop()
            self._call_later(ANEW_S, self.announce_all)

    def _flush_slice(self) -> None:
        if not self._outlet.ready:
            if self.waiting_rows > max(ROWS_AT_LEAST, 2 * self._residency.rows.capacity):
                self._wait_once()
        elif self.waiting_rows <= self._most_rows or self._look():
            noted = np.array(self._rows[self._taken : self._taken + self._most_rows], np.int64)
            self._taken += len(noted)
            if self._taken > max(ROWS_AT_LEAST, len(self._rows) // 2) or not self.waiting_rows:
                del self._rows[: self._taken]
                self._looked = max(0, self._looked - self._taken)
                self._taken = 0
            if len(noted):
                self._send(noted)
        if self.waiting_rows:
            self._is_waiting = True
            self._call_later(0.0 if self._outlet.ready else DELAY_S, self._flush)
        elif self._is_on:
            self._residency.note_with(self._first)

    def _look(self) -> bool:
        """Say which of the waiting rows are gone, before any of them is sent: their blocks may be in other rows.
        Return whether all have been looked at.
        """
        begin = max(self._looked, self._taken)
        self._looked = min(begin + LOOKED_A_SLICE, len(self._rows))
        rows = np.array(self._rows[begin : self._looked], np.int64)
        self._grow(self._residency.rows.capacity)
        self._learn_kinds()
        gone = np.unique(rows[self._are_gone(rows, self._masks(rows))])
        if len(gone):
            self._known[gone] = UNKNOWN
            head = CHANGES_HEAD.pack(CHANGES, len(gone), 0, 0, 0, 0)
            self._outlet.send(head + gone.astype(np.uint32).tobytes())
        return self._looked == len(self._rows)

    # One slice

    def _send(self, noted: Numbers) -> None:
        """Send the present state of these rows."""
        columns = self._residency.rows
        self._grow(columns.capacity)
        self._learn_kinds()
        wanted = self._published[as_array(columns.kind)[noted]] | self._known[noted]
        rows = self._parents_first(noted[wanted != 0])
        mask = self._masks(rows)
        is_gone, is_stored = self._are_gone(rows, mask), mask != 0
        is_same = (self._known[rows] != UNKNOWN) & ~is_gone
        in_memory = holding_any(mask, self._tokens.readable)
        is_new = is_stored & (~is_same | ((self._known[rows] == KNOWN) & in_memory))
        gone = rows[is_gone]
        other = is_same & is_stored & ~is_new
        new = rows[is_new]
        self._known[gone] = UNKNOWN
        self._known[new] = np.where(in_memory[is_new], WITH_TOKENS, KNOWN)
        self._generation[new] = np.frombuffer(columns.generation, np.uint32)[new]
        if len(gone) or len(new) or other.any():
            stored, parents, ids = self._stored_columns(new, mask[is_new])
            head = CHANGES_HEAD.pack(
                CHANGES, len(gone), int(other.sum()), len(new), len(parents) // 16, len(ids) // 4
            )  # fmt: skip
            changed = rows[other].astype(np.uint32).tobytes() + mask[other].tobytes()
            self._outlet.send(b"".join((head, gone.astype(np.uint32).tobytes(), changed, stored, parents, ids)))

    def _masks(self, rows: Numbers) -> npt.NDArray[np.uint8]:
        """Return the set of tiers of each of `rows`, empty for blocks that are not published."""
        columns = self._residency.rows
        found: npt.NDArray[np.uint8] = as_array(columns.mask)[rows] * self._published[as_array(columns.kind)[rows]]
        return found

    def _are_gone(self, rows: Numbers, mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Return whether the block that the publisher knows at each of `rows` is not there any more; `mask` has their
        sets of tiers.
        """
        is_other = as_array(self._residency.rows.generation)[rows] != self._generation[rows]
        found: npt.NDArray[np.bool_] = (self._known[rows] != UNKNOWN) & (is_other | (mask == 0))
        return found

    def _stored_columns(self, rows: Numbers, mask: npt.NDArray[np.uint8]) -> tuple[bytes, bytes, bytes]:
        """Return the columns of stored blocks: their fields, the keys of parents, token ids."""
        if not len(rows):
            return b"", b"", b""
        counts, ids = self._tokens.read(rows, mask)
        parent = np.frombuffer(self._residency.rows.parent, np.int32)[rows]
        follows = np.zeros(len(rows), np.uint8)
        follows[1:] = parent[1:] == rows[:-1]
        kind = as_array(self._residency.rows.kind)[rows].astype(np.uint32)
        stored = (rows.astype(np.uint32).tobytes(), kind.tobytes(), mask.tobytes(), counts.tobytes(), follows.tobytes())
        parent_key = self._residency.parent_key
        parents = b"".join([parent_key(row) for row in rows[follows == 0].tolist()])
        return b"".join(stored) + self._keys(rows), parents, ids

    def _keys(self, rows: Numbers) -> bytes:
        keys, numbers = self._residency.rows.keys, rows.tolist()
        try:
            return b"".join(map(keys.__getitem__, numbers))  # type: ignore[arg-type]
        except TypeError:  # None: the keys of rows that were taken over in bulk are elsewhere
            return b"".join(map(self._residency.key, numbers))

    def _parents_first(self, noted: Numbers) -> Numbers:
        """Return each of these rows once, at its last change, and before them the stored ancestors that the publisher
        does not know yet.
        """
        columns = self._residency.rows
        order = np.arange(1, len(noted) + 1)
        self._place[noted] = order  # the last of those that are the same row stays
        is_last = self._place[noted] == order
        noted, order = noted[is_last], order[is_last]
        parents = np.frombuffer(columns.parent, np.int32)
        above = parents[noted]
        places = np.where(above >= 0, self._place[above], 0)
        lost = (above >= 0) & (places == 0) & self._is_news(above)
        late = places > order
        found = noted
        if lost.any():
            extra: list[int] = []
            for row in above[lost].tolist():
                while row >= 0 and not self._place[row] and self._is_news(np.array([row]))[0]:
                    self._place[row] = 1
                    extra.append(row)
                    row = int(parents[row])
            found = np.concatenate((np.array(extra, np.int64), noted))
        self._place[found] = 0
        if lost.any() or late.any():
            depth = as_array(columns.depth)[found]
            found = found[np.argsort(depth, kind="stable")]
        return found

    def _is_news(self, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Return whether each of `rows` is stored and unknown to the publisher, or known as another block; False for
        -1.
        """
        columns = self._residency.rows
        stored = np.frombuffer(columns.mask, np.uint8)[rows] != 0
        other = np.frombuffer(columns.generation, np.uint32)[rows] != self._generation[rows]
        found: npt.NDArray[np.bool_] = stored & (other | (self._known[rows] == UNKNOWN))
        return found

    def _learn_kinds(self) -> None:
        """Find out which kinds of rows are published, and send them to the publisher first."""
        kinds = self._residency.kinds
        if len(kinds) == len(self._published):
            return
        texts = [self._kind_text(number) for number in range(len(self._published), len(kinds))]
        for number, text in enumerate(texts, len(self._published)):
            if text is not None:
                self._outlet.send(pack_kind(number, text[1], kinds[number].group, text[0]))
        more = np.array([text is not None for text in texts], np.uint8)
        self._published = np.concatenate((self._published, more))

    def _grow(self, capacity: int) -> None:
        more = capacity - len(self._place)
        if more > 0:
            self._generation = np.concatenate((self._generation, np.zeros(more, np.uint32)))
            self._place = np.concatenate((self._place, np.zeros(more, np.int32)))
        if capacity > len(self._known):
            self._known = np.concatenate((self._known, np.zeros(capacity - len(self._known), np.uint8)))
