"""Makes batches of events from records, for each topic's subscribers, and keeps batches for replay.

The module owns a model of what is stored where, in columns by row, the sequence numbers and the kept batches. It sends
nothing. An event costs an object, a block some nanoseconds. Invariants: no two rows have the same block, since the
daemon says that a row is gone before it names another row for its block; numbers of a topic have no gap; its first
event says that nothing is stored; a subscriber that applies a topic's batches in order, from the first or from a
snapshot on, has the model's state. Applying batches again that a snapshot contains already changes nothing in the end:
each of them sets the final state, or a later one does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstored.events.encoding import HASH_BYTES, Cleared, CopyPlace, Encode, Hashes, Removed, Stored, packed_hashes
from kvstored.events.records import Changes, KindRecord, Record, ResetRecord, StoredBlocks
from kvstored.tier_set import TIER_SETS

MAX_RUN = 1024  # blocks in one event
KEPT_BYTES = 64 << 20  # of batches for replay, of all topics together
LEAST_ROWS = 1024  # in the columns
LEAST_STALE = 1024  # entries of batches that are not kept any more, before they are dropped


Rows = npt.NDArray[np.unsignedinteger]
Bits = npt.NDArray[np.uint8]  # sets of places
_KIND = np.dtype([("topic", "i4"), ("group", "u2"), ("size", "u4")])
_COLUMNS = {"_placed": np.uint8, "_kind": np.uint32, "_count": np.uint16, "_hash": np.uint64, "_parent": np.uint64}


class EventBatch(NamedTuple):
    topic: bytes
    number: int
    payload: bytes


@dataclass
class _Topic:
    name: bytes
    next_number: int
    kept: deque[tuple[int, bytes]] = field(default_factory=deque)
    forgotten: int = 0  # batches that the stream's order of all still names
    events: list[Stored | Removed | Cleared] = field(default_factory=lambda: [Cleared()])
    is_current: bool = True  # else a process before this one published it, and this one has no block of it
    is_silent: bool = False  # since the last `beats`


class EventStream:
    """A maker of numbered event batches for all topics; it keeps the last ones for replay. `places` has the place of
    each tier's copies, by position. `buffer` is the number of batches kept for a topic, and `kept_bytes` bounds the
    kept batches of all topics.

    `now_s` returns the wall time. `first_number` is the first batch number of each topic. It is larger than any of a
    former process, so that a subscriber that lost the end of one process and the beginning of the next sees a gap.
    `former_topics` were published by former processes."""

    def __init__(
        self,
        places: Sequence[CopyPlace],
        encode: Encode,
        buffer: int,
        now_s: Callable[[], float],
        first_number: int = 0,
        kept_bytes: int = KEPT_BYTES,
        former_topics: Iterable[str] = (),
    ) -> None:
        self._first_number = first_number
        self._places = list(dict.fromkeys(places))
        bits = [1 << self._places.index(place) for place in places]  # of each tier's place; tiers may share one
        self._bits = np.array(
            [reduce(or_, (bits[tier] for tier in tiers), 0) for tiers in TIER_SETS[: 2 ** len(places)]], np.uint8
        )
        self._encode = encode
        self._buffer = buffer
        self._most_bytes = kept_bytes
        self.kept_bytes = 0
        self._kept: deque[_Topic] = deque()  # whose each batch is, oldest first
        self._stale = 0  # of them, those of batches that are not kept any more
        self._placed: Bits = np.zeros(0, np.uint8)  # by row: where its block was announced
        self._kind = np.zeros(0, np.uint32)
        self._count = np.zeros(0, np.uint16)  # of token ids
        self._hash, self._parent = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
        self._tokens: dict[int, bytes] = {}  # by row
        self._now_s = now_s
        self._kinds = np.zeros(0, _KIND)
        self._topics = {name.encode(): _Topic(name.encode(), first_number, is_current=False) for name in former_topics}
        self._whole: EventBatch | None = None  # the last snapshot, while its number is the latest
        self.published_events = self.replayed_batches = self.snapshots = 0

    @property
    def topics(self) -> list[bytes]:
        return list(self._topics)

    def apply(self, records: Iterable[Record]) -> None:
        """Take in the changes of blocks in `records`. `batches` then yields the events that follow from them."""
        for record in records:
            if isinstance(record, Changes):
                self._move(record.gone, np.zeros(len(record.gone), np.uint8))
                self._move(record.changed, self._bits[record.masks])
                self._stored(record.stored)
            elif isinstance(record, KindRecord):
                topic = self._topics.setdefault(record.topic, _Topic(record.topic, self._first_number))
                topic.is_current = True
                self._learn(record)
            elif isinstance(record, ResetRecord):
                self._placed[:] = 0
                self._tokens.clear()
                for topic in self._topics.values():
                    topic.events = [Cleared()]  # what has not been sent yet is void

    def batches(self) -> Iterator[EventBatch]:
        """Yield the batches to publish now: one for each topic with events."""
        for topic in self._topics.values():
            if topic.events:
                events, topic.events = topic.events, []
                self.published_events += len(events)
                yield self._batch(topic, events)

    def beats(self) -> Iterator[EventBatch]:
        """Yield an empty batch for each topic that had no events since the last call. By its number a subscriber sees
        that it lost earlier batches.
        """
        for topic in self._topics.values():
            if topic.is_silent and topic.next_number > self._first_number:
                yield self._batch(topic, [])
            topic.is_silent = True

    def replay(self, first: int, name: bytes | None = None) -> Iterator[EventBatch]:
        """Yield the batches of the topic `name` from `first`, a batch number, to the latest. With `name` None it is the
        only topic.

        If some of these batches are gone, yield one batch under the latest number that clears everything and then
        announces all stored blocks. For a topic that this process does not have, yield a batch that clears everything,
        under the number before its first. Without a name and with several topics, yield nothing."""
        topic = self._only_topic() if name is None else self._topics.get(name)
        if topic is None:
            if name is not None:
                self.replayed_batches += 1
                yield EventBatch(name, max(0, self._first_number - 1), self._encode(self._now_s(), [Cleared()]))
            return
        end = topic.next_number
        if first == end or end == self._first_number:
            return
        while topic.kept and topic.kept[0][0] <= first < end:
            self.replayed_batches += 1
            yield EventBatch(topic.name, *topic.kept[first - topic.kept[0][0]])
            first += 1
            if first == end:
                return
        self.replayed_batches += 1
        yield self._snapshot_batch(topic)

    def forget_snapshot(self) -> None:
        """Free the memory of the last snapshot of all stored blocks, since no subscriber waits for it."""
        self._whole = None

    def _only_topic(self) -> _Topic | None:
        """Return the topic of a request without a name: the only one, otherwise None."""
        found = [topic for topic in self._topics.values() if topic.is_current] or list(self._topics.values())
        return found[0] if len(found) == 1 else None

    def _batch(self, topic: _Topic, events: Sequence[Stored | Removed | Cleared]) -> EventBatch:
        payload, number = self._encode(self._now_s(), events), topic.next_number
        self._keep(topic, number, payload)
        topic.next_number += 1
        topic.is_silent = False
        return EventBatch(topic.name, number, payload)

    def _snapshot_batch(self, topic: _Topic) -> EventBatch:
        number = topic.next_number - 1
        if self._whole is None or (self._whole.topic, self._whole.number) != (topic.name, number):
            self._whole = None
            self.snapshots += 1
            self._whole = EventBatch(topic.name, number, self._encode(self._now_s(), self._snapshot(topic)))
        return self._whole

    def _keep(self, topic: _Topic, number: int, payload: bytes) -> None:
        topic.kept.append((number, payload))
        self._kept.append(topic)
        self.kept_bytes += len(payload)
        if len(topic.kept) > self._buffer:
            topic.forgotten += 1
            self.kept_bytes -= len(topic.kept.popleft()[1])
            self._stale += 1
        while self.kept_bytes > self._most_bytes:
            oldest = self._kept.popleft()
            if self._is_kept(oldest):
                self.kept_bytes -= len(oldest.kept.popleft()[1])
        if self._stale > max(LEAST_STALE, len(self._kept) // 2):
            self._kept = deque(filter(self._is_kept, self._kept))

    def _is_kept(self, topic: _Topic) -> bool:
        """Take the oldest entry of all topics, which is this topic's, and return whether its batch is still kept."""
        if not topic.forgotten:
            return True
        topic.forgotten -= 1
        self._stale -= 1
        return False

    # What changes

    def _learn(self, kind: KindRecord) -> None:
        if kind.number >= len(self._kinds):
            self._kinds = np.concatenate((self._kinds, np.zeros(kind.number + 1 - len(self._kinds), _KIND)))
        self._kinds[kind.number] = self.topics.index(kind.topic), kind.group, kind.block_tokens

    def _grow(self, rows: int) -> None:
        """Extend the columns to `rows` rows at least."""
        more = max(rows - len(self._placed), LEAST_ROWS, len(self._placed) // 8)
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.concatenate((getattr(self, name), np.zeros(more, dtype))))

    def _stored(self, blocks: StoredBlocks) -> None:
        """Take in new blocks, and those whose token ids have become known."""
        rows, counts = blocks.rows, blocks.counts
        if not len(rows):
            return
        if int(rows.max()) >= len(self._placed):
            self._grow(int(rows.max()) + 1)
        now = self._bits[blocks.masks]
        # a block that was announced without its token ids is announced again
        self._placed[rows] &= ~np.where((counts > 0) & (self._count[rows] == 0), now, 0).astype(np.uint8)
        self._kind[rows], self._count[rows] = blocks.kinds, counts
        self._hash[rows], self._parent[rows] = blocks.hashes, blocks.parents
        if blocks.tokens:
            end = 0
            for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
                begin, end = end, end + 4 * count
                self._tokens[row] = blocks.tokens[begin:end]
        self._move(rows, now)

    def _move(self, rows: Rows, now: Bits) -> None:
        """Announce that the blocks of `rows` are in the places of the sets `now` from now on, and nowhere else."""
        if not len(rows):
            return
        known = self._placed[rows]
        self._placed[rows] = now
        at, places = np.nonzero(np.unpackbits((known ^ now)[:, None], axis=1, bitorder="little"))
        changed = rows[at]
        self._announce(list(self._topics.values()), changed, places, now[at] >> places & 1 != 0)
        gone = rows[now == 0]
        self._count[gone] = 0
        if self._tokens:
            for row in gone.tolist():
                self._tokens.pop(row, None)

    def _announce(
        self, to: Sequence[_Topic], rows: Rows, places: npt.NDArray[np.integer], is_stored: npt.NDArray[np.bool_]
    ) -> None:
        """Add to the events of the topics `to`, by number, that the block of each of `rows` `is_stored` in its place
        of `places`, or that it was removed from there. Neighbours that one event can name are added together.
        """
        kinds = self._kinds[self._kind[rows]]
        if _differ(kinds["topic"]).any():
            order = np.argsort(kinds["topic"], kind="stable")
            rows, places, is_stored, kinds = rows[order], places[order], is_stored[order], kinds[order]
        counts, hashes, parents = self._count[rows], self._hash[rows], self._parent[rows]
        sizes, has_tokens = np.where(kinds["size"] > 0, kinds["size"], counts), counts > 0
        begins = np.ones(len(rows), np.bool_)
        begins[1:] = is_stored[1:] & ((parents[1:] != hashes[:-1]) | _differ(sizes) | _differ(has_tokens))
        for column in (kinds["topic"], kinds["group"], places, is_stored):
            begins[1:] |= _differ(column)
        first, packed = np.flatnonzero(begins), packed_hashes(hashes)
        columns = (kinds["topic"], kinds["group"], places, is_stored, parents, sizes, has_tokens)
        heads = zip(*(column[first].tolist() for column in columns), strict=True)
        spans = pairwise([*first.tolist(), len(rows)])
        for (begin, end), (number, group, place, is_here, parent, size, with_ids) in zip(spans, heads, strict=True):
            if not is_here:
                removed = Removed(self._places[place], group, packed[HASH_BYTES * begin : HASH_BYTES * end])
                _add_removed(to[number].events, removed)
                continue
            for at in range(begin, end, MAX_RUN):
                stop = min(at + MAX_RUN, end)
                ids = b"".join([self._tokens[row] for row in rows[at:stop].tolist()]) if with_ids else b""
                above, named = parent if at == begin else int(parents[at]), packed[HASH_BYTES * at : HASH_BYTES * stop]
                _add_stored(to[number].events, Stored(self._places[place], above, size, group, named, ids))

    # All blocks

    def _snapshot(self, topic: _Topic) -> list[Stored | Removed | Cleared]:
        """Return each block after its parent, with its places: pieces of chains that are in equal places."""
        number = self.topics.index(topic.name)
        rows = np.flatnonzero(self._placed)
        rows = rows[self._kinds["topic"][self._kind[rows]] == number]
        rows = rows[_parents_first(self._hash[rows], self._parent[rows])]
        placed = self._placed[rows]
        begins = np.ones(len(rows), np.bool_)
        begins[1:] = (self._parent[rows][1:] != self._hash[rows][:-1]) | _differ(placed)
        order = np.arange(len(rows))
        since = order - np.maximum.accumulate(np.where(begins, order, 0))
        piece = np.cumsum(since % MAX_RUN == 0)  # no longer than an event
        at, places = np.nonzero(np.unpackbits(placed[:, None], axis=1, bitorder="little"))
        order = np.lexsort((at, places, piece[at]))
        whole = _Topic(topic.name, 0)
        self._announce([whole] * len(self._topics), rows[at[order]], places[order], np.ones(len(at), np.bool_))
        return whole.events


def _differ(column: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Return for each entry but the first whether it differs from the one before."""
    found: npt.NDArray[np.bool_] = column[1:] != column[:-1]
    return found


def _add_stored(events: list[Stored | Removed | Cleared], new: Stored) -> None:
    """Add `new` to `events`: to the last of them if `new` continues it, so that one event names both."""
    last = events[-1] if events else None
    if (
        isinstance(last, Stored)
        and new.parent == last.last_hash
        and (last.place, last.group, last.block_tokens) == (new.place, new.group, new.block_tokens)
        and bool(last.tokens) == bool(new.tokens)
        and len(last.hashes) + len(new.hashes) <= MAX_RUN * HASH_BYTES
    ):
        last.hashes += new.hashes
        last.tokens += new.tokens
    else:
        events.append(new)


def _add_removed(events: list[Stored | Removed | Cleared], new: Removed) -> None:
    last = events[-1] if events else None
    if isinstance(last, Removed) and (last.place, last.group) == (new.place, new.group):
        last.hashes += new.hashes
    else:
        events.append(new)


def _parents_first(hashes: Hashes, parents: Hashes) -> list[int]:
    """Return the positions of blocks, a parent before its children."""
    order = np.argsort(hashes)
    found = np.searchsorted(hashes, parents, sorter=order)
    above = order[np.minimum(found, len(order) - 1)] if len(order) else order
    above_of = np.where(hashes[above] == parents, above, -1).tolist()
    is_seen, positions = bytearray(len(hashes)), list[int]()
    for position in range(len(hashes)):
        line: list[int] = []
        while position >= 0 and not is_seen[position]:
            is_seen[position] = 1
            line.append(position)
            position = above_of[position]
        positions.extend(reversed(line))
    return positions
