"""Items: arrays that a model computed from something, such as embeddings, stored under a digest of that thing.

A fingerprint of one group of kind "items" says what the array depends on beside it: model, weights, dtype, library,
settings (`item_fingerprint`). An item is stored as a named object is (`kvstore_proto.objects`): a head with its size
and a checksum of all bytes, then the bytes, here an array's dtype and shape, and its numbers. An item that is longer
than `ITEM_BLOCK_BYTES` takes several blocks of that size, named by the digest and that checksum, and its first block
is stored last. So blocks of two puts never pass for one item, and what a put left behind is a miss.

Many items are read by one call of the daemon, or by two where some have several blocks. Nothing here raises for a
miss, for an absent daemon, or for a full store.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from kvstore_client.arguments import PutTerms
from kvstore_client.errors import invalid
from kvstore_client.memory import Bytes
from kvstore_client.payload import Payload
from kvstore_client.results import TIER_NAMES, UNKNOWN_TIER
from kvstore_client.session import DEFAULT_PUT_DEADLINE_S, Session
from kvstore_proto.arena import HEADER_BYTES, slot_bytes
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.objects import HEAD_BYTES, NAME_TOKENS, ObjectChecksum, ObjectHead, object_tokens, read_head

ITEM_BLOCK_BYTES: Final = 256 << 10
ITEM_STAGING_BYTES: Final = 16 << 20  # enough for a session that puts items: a batch, or a few long ones
DIGEST_BYTES: Final = 32
MAX_ITEM_BYTES: Final = 1 << 31
_ARRAY = struct.Struct("<16sHHI8Q")  # dtype, dimensions, zero, zero, shape
_DATA_OFFSET: Final = 128  # of the array's numbers in the first payload: a multiple of 64
_ARRAY_BYTES: Final = _DATA_OFFSET - HEAD_BYTES
_MOST_ROUNDS = 4  # of one get: blocks may be evicted between the look and the lease
_Place = TypeVar("_Place")


def item_fingerprint(
    what: str, *, model: str, weights: str, dtype: str, library: str, settings: Mapping[str, Any]
) -> Fingerprint:
    """Return the fingerprint of the items `what` ("embedding") that a model computes: `weights` is a digest of its
    weights, `dtype` the type it computes in, `library` the name and version of what runs it, and `settings` is whatever
    else its results depend on, as JSON. `model` is a label for people.
    """
    layout = {"items": what, "library": library, "settings": settings}
    return Fingerprint(
        model,
        weights,
        kv_dtype=dtype,
        layout=json.dumps(layout, sort_keys=True, separators=(",", ":")),
        block_tokens=NAME_TOKENS,
        engine_block_tokens=NAME_TOKENS,
        key_hash="blake2b",
        groups=(LayerGroup(0, "items"),),
    )


def item_digest(*parts: bytes | memoryview | Bytes) -> bytes:
    """Return the digest, of 32 bytes, of what an item was computed from. Each part is hashed behind its length, so that
    two different lists of parts have different digests. An array is hashed by its bytes, which are contiguous.
    """
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"kvstore item")
    for part in parts:
        view = memoryview(part.data if isinstance(part, np.ndarray) else part).cast("B")
        state.update(len(view).to_bytes(8, "little"))
        state.update(view)
    return state.digest()


@dataclass(frozen=True, slots=True)
class Item:
    """An array as it is stored: `data` has its bytes, uint8[n], in C order. `dtype` is NumPy's name for the type of its
    numbers ("<f4"), or the writer's own for a type that NumPy has not ("bfloat16").
    """

    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    def array(self) -> npt.NDArray[Any]:
        """Return the item as an array of NumPy, which shows `data`. Raises TypeError for a dtype that NumPy has not."""
        return self.data.view(np.dtype(self.dtype)).reshape(self.shape)


def item_of(array: npt.NDArray[Any]) -> Item:
    """Return an array of NumPy as an item."""
    whole = np.ascontiguousarray(array)
    return Item(whole.dtype.str, array.shape, whole.reshape(-1).view(np.uint8))


class ItemStore:
    """A store of items in `session`, whose fingerprint has one group of kind "items". A call for reading takes at most
    `deadline_s` seconds of waiting for the daemon, which is the session's default for None; a put takes at most
    `put_deadline_s`.
    """

    def __init__(
        self, session: Session, *, deadline_s: float | None = None, put_deadline_s: float = DEFAULT_PUT_DEADLINE_S
    ) -> None:
        if [group.kind for group in session.fingerprint.groups] != ["items"]:
            raise invalid("items need a session whose fingerprint has one layer group of kind 'items'")
        self.session, self._deadline_s, self._put_deadline_s = session, deadline_s, put_deadline_s

    def get(self, digests: Sequence[bytes]) -> list[Item | None]:
        """Return a copy of the item of each digest, or None where none is stored. Raises KVStoreError(INVALID) for a
        digest of another length than 32 bytes.
        """
        names = [_name(digest) for digest in digests]
        read = dict[str, _Read]()

        def take(name: str, payload: Bytes) -> None:
            read[name] = _Read(payload)

        self._each({name: object_tokens(name, 1) for name in dict.fromkeys(names)}, take)
        self._read_rest(read)
        found = {name: each.item() for name, each in read.items()}
        if damaged := [object_tokens(name, 1) for name, item in found.items() if item is None]:
            self.session.delete(np.concatenate(damaged), deadline_s=self._deadline_s)  # so that it can be put again
        return [found.get(name) for name in names]

    def through(
        self, digests: Sequence[bytes], compute: Callable[[list[int]], Sequence[Item]], **kept: Unpack[PutTerms]
    ) -> list[Item]:
        """Return the item of each digest. One call of `compute` computes the items that are not stored: it gets their
        positions in `digests`, of each digest the first one, and returns the items in order; then they are stored.
        `kept` says how long, see `PutTerms`. Raises the errors of `compute`.
        """
        found = dict(zip(digests, self.get(digests), strict=True))
        places = {digest: place for place, digest in reversed(list(enumerate(digests))) if found[digest] is None}
        missing = sorted(places.values())
        if missing:
            computed = [(digests[place], item) for place, item in zip(missing, compute(missing), strict=True)]
            found.update(computed)
            self.put(computed, **kept)
        return [item for digest in digests if (item := found[digest]) is not None]

    def contains(self, digests: Sequence[bytes]) -> list[bool]:
        """Return for each digest whether its item, or the first block of it, is stored."""
        if not digests:
            return []
        return self._stored(np.concatenate([object_tokens(_name(digest), 1) for digest in digests]))

    def put(self, items: Iterable[tuple[bytes, Item]], **kept: Unpack[PutTerms]) -> int:
        """Store items under their digests, and return how many of them are stored now or were before. `kept` says how
        long, see `PutTerms`. A stored item never changes: the first one of a digest stays.
        """
        alike = defaultdict[int, list[tuple[bytes, Item, ObjectHead]]](list)
        for digest, item in items:
            head = _head_of(item)
            alike[head.block_bytes].append((digest, item, head))
        return sum(self._put_alike(size, each, kept) for size, each in alike.items())

    def delete(self, digests: Sequence[bytes]) -> None:
        """Delete the items of `digests`. The later blocks of long ones stay, unread, until they are evicted."""
        if digests:
            tokens = np.concatenate([object_tokens(_name(digest), 1) for digest in digests])
            self.session.delete(tokens, deadline_s=self._deadline_s)

    def _put_alike(
        self, block_bytes: int, items: Sequence[tuple[bytes, Item, ObjectHead]], kept: Mapping[str, Any]
    ) -> int:
        """Store items whose blocks have one size, the first block of each last."""
        tails = [(_tail_tokens(_name(digest), head), item, head) for digest, item, head in items if head.blocks > 1]
        tokens = [tail for tail, _, _ in tails] + [object_tokens(_name(digest), 1) for digest, _, _ in items]
        payloads: list[Payload] = [
            partial(_write, item, head, block) for _, item, head in tails for block in range(1, head.blocks)
        ]
        payloads += [partial(_write, item, head, 0) for _, item, head in items]
        receipt = self.session.put(
            np.concatenate(tokens),
            payloads=payloads,
            payload_bytes=block_bytes,
            deadline_s=self._put_deadline_s,
            **kept,
        )
        return sum(status in ("stored", "present") for status in receipt.statuses[-len(items) :])

    def _read_rest(self, read: Mapping[str, _Read]) -> None:
        """Read the blocks behind the first of the items that have several."""
        wanted = {
            (name, block): tokens
            for name, each in read.items()
            if each.head is not None and each.head.blocks > 1
            for block, tokens in enumerate(_tail_tokens(name, each.head).reshape(-1, NAME_TOKENS), 1)
        }

        def take(place: tuple[str, int], payload: Bytes) -> None:
            read[place[0]].add(place[1], payload)

        self._each(wanted, take)

    def _each(self, wanted: Mapping[_Place, npt.NDArray[np.int32]], take: Callable[[_Place, Bytes], None]) -> None:
        """Call `take` with the place and the payload of each of the `wanted` blocks that is stored, which are given by
        their token ids. What is taken is copied; blocks whose lease ended meanwhile are not taken.
        """
        places = list(wanted)
        for _ in range(_MOST_ROUNDS):
            if not places:
                return
            tokens = np.concatenate([wanted[place] for place in places])
            places = [place for place, is_stored in zip(places, self._stored(tokens), strict=True) if is_stored]
            if not places:
                return
            tokens = np.concatenate([wanted[place] for place in places])
            with self.session.get(tokens, deadline_s=self._deadline_s) as lease:
                copies = [lease.payload(block).copy() for block in range(len(lease))]
                if copies and not lease.valid:
                    return
            for place, payload in zip(places, copies, strict=False):
                take(place, payload)
            places = places[len(copies) + 1 :]  # the one behind them is not there any more

    def _stored(self, tokens: npt.NDArray[np.int32]) -> list[bool]:
        """Return for each block whether it is stored. Only where the lookup index cannot say is the daemon asked."""
        tiers = self.session.probe(tokens).tiers
        if not tiers or UNKNOWN_TIER in tiers:
            tiers = self.session.lookup(tokens, deadline_s=self._deadline_s).tiers
        blocks = len(tokens) // NAME_TOKENS
        return [tier != TIER_NAMES[0] for tier in tiers] if len(tiers) == blocks else [False] * blocks


class _Read:
    """An item that is being read, from the payload of its first block on. `head` is None if that is no item's."""

    def __init__(self, first: Bytes) -> None:
        head = read_head(first[:HEAD_BYTES].data)
        is_item = (
            head is not None and _ARRAY_BYTES <= head.size_bytes <= MAX_ITEM_BYTES and len(first) == head.block_bytes
        )
        self.head = head if is_item else None
        self._whole = np.zeros(0 if self.head is None else HEAD_BYTES + self.head.size_bytes, np.uint8)
        self.add(0, first)

    def add(self, block: int, payload: Bytes) -> None:
        begin = block * (0 if self.head is None else self.head.block_bytes)
        part = payload[: max(len(self._whole) - begin, 0)]
        self._whole[begin : begin + len(part)] = part

    def item(self) -> Item | None:
        """Return the item, or None if the bytes that were read are not one whole item."""
        if self.head is None or not self.head.is_of(self._whole[HEAD_BYTES:].data):
            return None
        dtype, dimensions, _, _, *shape = _ARRAY.unpack_from(self._whole.data, HEAD_BYTES)
        return Item(dtype.rstrip(b"\0").decode(), tuple(shape[:dimensions]), self._whole[_DATA_OFFSET:])


def _name(digest: bytes) -> str:
    if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
        raise invalid(f"the digest of an item has {DIGEST_BYTES} bytes: make it by item_digest")
    return digest.hex()


def _tail_tokens(name: str, head: ObjectHead) -> npt.NDArray[np.int32]:
    return object_tokens(f"{name} {head.checksum:016x}", head.blocks - 1, first=1)


def _head_of(item: Item) -> ObjectHead:
    """Return the head of a stored item: of one block of a whole slot, or of several of `ITEM_BLOCK_BYTES` bytes."""
    if len(item.shape) > 8 or len(item.dtype.encode()) > 16:
        raise invalid(f"an item has at most 8 dimensions and 16 letters of dtype, got {item.shape} of {item.dtype}")
    nbytes = _DATA_OFFSET + len(item.data)
    if nbytes > MAX_ITEM_BYTES:
        raise invalid(f"an item has at most {MAX_ITEM_BYTES} bytes, got {nbytes}")
    size = slot_bytes(nbytes) - HEADER_BYTES if nbytes <= ITEM_BLOCK_BYTES else ITEM_BLOCK_BYTES
    checksum = ObjectChecksum()
    checksum.update(_described(item))
    checksum.update(item.data.data)
    return ObjectHead(nbytes - HEAD_BYTES, size, checksum.value)


def _described(item: Item) -> bytes:
    shape = (*item.shape, *(0,) * (8 - len(item.shape)))
    return _ARRAY.pack(item.dtype.encode(), len(item.shape), 0, 0, *shape).ljust(_ARRAY_BYTES, b"\0")


def _write(item: Item, head: ObjectHead, block: int, destination: Bytes) -> None:
    """Write the payload of one block of an item, with zeros behind its end."""
    begin = 0
    if not block:
        begin = _DATA_OFFSET
        np.copyto(destination[:begin], np.frombuffer(head.pack() + _described(item), np.uint8))
    first = max(block * head.block_bytes - _DATA_OFFSET, 0)
    part = item.data[first : first + len(destination) - begin]
    np.copyto(destination[begin : begin + len(part)], part)
    destination[begin + len(part) :] = 0
