"""Makes batches of events from records, for each topic's subscribers, and keeps batches for replay.

The module owns a plain model of what is stored where, by topic, the sequence numbers and the kept batches. It sends
nothing. Invariants: numbers of a topic have no gap; its first event says that nothing is stored; a subscriber that
applies a topic's batches in order, from the first or from a snapshot on, has the model's state. Applying batches again
that a snapshot contains already changes nothing in the end: each of them sets the final state, or a later one does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import NamedTuple

from kvstored.events.encoding import Cleared, CopyPlace, Encode, Removed, Stored, hash_of
from kvstored.events.records import Changes, KindRecord, Record, ResetRecord, StoredBlock
from kvstored.tier_set import TIER_SETS

NO_PARENT = bytes(16)
MAX_RUN = 1024  # blocks in one event
KEPT_BYTES = 64 << 20  # of batches for replay, of all topics together
LEAST_STALE = 1024  # entries of batches that are not kept any more, before they are dropped


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
    blocks: dict[bytes, StoredBlock] = field(default_factory=dict)
    events: list[Stored | Removed | Cleared] = field(default_factory=lambda: [Cleared()])
    last_key: bytes = b""  # of the last block in the last event
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
        self._bits = [reduce(or_, (bits[tier] for tier in tiers), 0) for tiers in TIER_SETS[: 2 ** len(places)]]
        self._encode = encode
        self._buffer = buffer
        self._most_bytes = kept_bytes
        self.kept_bytes = 0
        self._kept: deque[_Topic] = deque()  # whose each batch is, oldest first
        self._stale = 0  # of them, those of batches that are not kept any more
        self._rows: dict[int, tuple[_Topic, bytes]] = {}
        self._now_s = now_s
        self._kinds: dict[int, KindRecord] = {}
        self._topics = {name.encode(): _Topic(name.encode(), first_number, is_current=False) for name in former_topics}
        self._whole: EventBatch | None = None  # the last snapshot, while its number is the latest
        self._topic_of_kind: dict[int, _Topic] = {}
        self.published_events = self.replayed_batches = self.snapshots = 0

    @property
    def topics(self) -> list[bytes]:
        return list(self._topics)

    def apply(self, records: Iterable[Record]) -> None:
        """Take in the changes of blocks in `records`. `batches` then yields the events that follow from them."""
        for record in records:
            if isinstance(record, Changes):
                for row in record.gone:
                    self._gone(row)
                for row, mask in record.changed:
                    self._changed(row, mask)
                for block in record.stored:
                    self._stored(block)
            elif isinstance(record, KindRecord):
                topic = self._topics.setdefault(record.topic, _Topic(record.topic, self._first_number))
                topic.is_current = True
                self._kinds[record.number], self._topic_of_kind[record.number] = record, topic
            elif isinstance(record, ResetRecord):
                self._rows.clear()
                for topic in self._topics.values():
                    topic.blocks.clear()
                    topic.events = [Cleared()]  # what has not been sent yet is void
                    topic.last_key = b""

    def batches(self) -> Iterator[EventBatch]:
        """Yield the batches to publish now: one for each topic with events."""
        for topic in self._topics.values():
            if topic.events:
                events, topic.events, topic.last_key = topic.events, [], b""
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

    # One block

    def _stored(self, new: StoredBlock) -> None:
        topic, key = self._topic_of_kind[new.kind], new.key
        before, known = topic.blocks.get(key), 0
        topic.blocks[key] = new
        self._rows[new.row] = topic, key
        if before is not None:
            known = self._bits[before.mask]
            if new.tokens and not before.tokens:
                known &= ~self._bits[new.mask]  # announced without its tokens so far
        self._announce(topic, new, known, self._bits[new.mask])

    def _gone(self, row: int) -> None:
        topic, key = self._rows.pop(row)
        before = topic.blocks.get(key)
        if before is not None and before.row == row:  # else it was stored again, in another row
            del topic.blocks[key]
            self._announce(topic, before, self._bits[before.mask], 0)

    def _changed(self, row: int, mask: int) -> None:
        """Note that the block of `row` is in the places of `mask` now."""
        topic, key = self._rows[row]
        before = topic.blocks.get(key)
        if before is not None and before.row == row:
            block = topic.blocks[key] = before._replace(mask=mask)
            self._announce(topic, block, self._bits[before.mask], self._bits[mask])

    def _announce(self, topic: _Topic, block: StoredBlock, known: int, now: int) -> None:
        """Announce that `block` is in the places of the bits `now`, where `known` ones are announced."""
        differing = known ^ now
        while differing:
            bit = differing & -differing
            place = self._places[bit.bit_length() - 1]
            if now & bit:
                self._add_stored(topic, block, place)
            else:
                self._add_removed(topic, block, place)
            differing ^= bit

    def _add_stored(self, topic: _Topic, block: StoredBlock, place: CopyPlace) -> None:
        kind, last = self._kinds[block.kind], topic.events[-1] if topic.events else None
        size = kind.block_tokens or len(block.tokens) // 4
        continues = (
            isinstance(last, Stored)
            and block.parent == topic.last_key
            and last.place == place
            and last.group == kind.group
            and last.block_tokens == size
            and bool(last.tokens) == bool(block.tokens)
            and len(last.hashes) < MAX_RUN
        )
        if not continues:
            parent = None if block.parent == NO_PARENT else hash_of(block.parent)
            last = Stored(place, parent, size, kind.group)
            topic.events.append(last)
        assert isinstance(last, Stored)
        last.hashes.append(hash_of(block.key))
        last.tokens += block.tokens
        topic.last_key = block.key

    def _add_removed(self, topic: _Topic, block: StoredBlock, place: CopyPlace) -> None:
        group, last = self._kinds[block.kind].group, topic.events[-1] if topic.events else None
        if not (isinstance(last, Removed) and last.place == place and last.group == group):
            last = Removed(place, group)
            topic.events.append(last)
        last.hashes.append(hash_of(block.key))
        topic.last_key = b""

    # All blocks

    def _snapshot(self, topic: _Topic) -> list[Stored | Removed | Cleared]:
        """Return each block after its parent, with its places: pieces of chains that are in equal places."""
        whole, piece = _Topic(topic.name, 0), list[StoredBlock]()
        for key in _parents_first(topic.blocks):
            block = topic.blocks[key]
            if piece and (
                len(piece) == MAX_RUN
                or block.parent != piece[-1].key
                or self._bits[block.mask] != self._bits[piece[-1].mask]
            ):
                self._add_piece(whole, piece)
                piece = []
            piece.append(block)
        self._add_piece(whole, piece)
        return whole.events

    def _add_piece(self, whole: _Topic, piece: Sequence[StoredBlock]) -> None:
        for position, place in enumerate(self._places):
            for block in piece:
                if self._bits[block.mask] >> position & 1:
                    self._add_stored(whole, block, place)


def _parents_first(blocks: dict[bytes, StoredBlock]) -> Iterator[bytes]:
    seen: set[bytes] = set()
    for key in blocks:
        line: list[bytes] = []
        while key in blocks and key not in seen:
            seen.add(key)
            line.append(key)
            key = blocks[key].parent
        yield from reversed(line)
