"""The bytes of a batch of events, as vLLM's decoders read them.

A batch is the array [time, events, rank]. `map`: each event is a map with its "type", as of vLLM 0.24; `array`: an
array that begins with the type, as before. Hashes are integers below 2**63, which every consumer's 64-bit type holds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Event = Any
Raw = Callable[[bytes], Any]  # marks bytes that are packed already
Hashes = npt.NDArray[np.uint64]
HASH_MASK = (1 << 63) - 1
HASH_BYTES = 9  # in msgpack
Encode = Callable[[float, Sequence["Stored | Removed | Cleared"]], bytes]
_HASH = np.dtype([("type", "u1"), ("number", ">u8")])
_SHORT_ID, _ID = np.dtype([("type", "u1"), ("number", ">u2")]), np.dtype([("type", "u1"), ("number", ">i4")])
_UINT16, _UINT32, _UINT64, _INT32 = 0xCD, 0xCE, 0xCF, 0xD2  # types in msgpack


class CopyPlace(NamedTuple):
    """The place of block copies, in the words of KV events (messages to routers): a medium such as "CPU". `locality` is
    "" for this node."""

    medium: str
    locality: str = ""


@dataclass(slots=True)
class Stored:
    """An event which says that consecutive blocks of one chain are stored. `parent` is the hash of the block before the
    first one, 0 at the start of a chain. `hashes` are the packed hashes of the blocks, and `tokens` the token ids
    of all the blocks, or empty."""

    place: CopyPlace
    parent: int
    block_tokens: int
    group: int
    hashes: bytes
    tokens: bytes

    @property
    def last_hash(self) -> int:
        return int.from_bytes(self.hashes[1 - HASH_BYTES :], "big")


@dataclass(slots=True)
class Removed:
    place: CopyPlace
    group: int
    hashes: bytes


@dataclass(slots=True)
class Cleared:
    pass


def hashes_of(keys: npt.NDArray[np.uint8]) -> Hashes:
    """Return the numbers below 2**63 that stand for blocks in events. `keys` are the bytes of the blocks' keys."""
    halves = keys.view(">u8").reshape(-1, 2)
    found: Hashes = (halves[:, 0] ^ halves[:, 1]).astype(np.uint64) & np.uint64(HASH_MASK)
    return found


def packed_hashes(hashes: Hashes) -> bytes:
    """Return `hashes` as they are in a message, `HASH_BYTES` for each."""
    packed = np.empty(len(hashes), _HASH)
    packed["type"], packed["number"] = _UINT64, hashes
    return packed.tobytes()


def encoder(encoding: str) -> Encode:
    """Return a function that encodes a batch of events; its arguments are the time in seconds and the events.
    `encoding` is "map" or "array"."""
    import msgspec

    pack, form = msgspec.msgpack.Encoder().encode, _as_map if encoding == "map" else _as_array

    def encode(time_s: float, events: Sequence[Stored | Removed | Cleared]) -> bytes:
        packed: bytes = pack([time_s, [form(event, msgspec.Raw) for event in events], 0])
        return packed

    return encode


def _array(count: int, packed: bytes) -> bytes:
    """Return an array in msgpack; `packed` are its `count` elements."""
    if count < 16:
        head = bytes([0x90 | count])
    else:
        head = struct.pack(">BH", 0xDC, count) if count < 1 << 16 else struct.pack(">BI", 0xDD, count)
    return head + packed


def _hashes(packed: bytes) -> bytes:
    return _array(len(packed) // HASH_BYTES, packed)


def _ids(tokens: bytes) -> bytes:
    """Return token ids as an array in msgpack: the elements have one width, since no consumer minds, and single widths
    would take ten times as long.
    """
    if not tokens:
        return _array(0, b"")
    ids = np.frombuffer(tokens, "<i4")
    least, most = int(ids.min()), int(ids.max())
    is_short = least >= 0 and most < 1 << 16
    packed = np.empty(len(ids), _SHORT_ID if is_short else _ID)
    packed["type"] = _UINT16 if is_short else _UINT32 if least >= 0 else _INT32
    packed["number"] = ids
    return _array(len(ids), packed.tobytes())


def _as_map(event: Stored | Removed | Cleared, raw: Raw) -> Event:
    if isinstance(event, Cleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, Removed):
        packed: dict[str, Any] = {
            "type": "BlockRemoved", "block_hashes": raw(_hashes(event.hashes)), "medium": event.place.medium,
        }  # fmt: skip
    else:
        packed = {
            "type": "BlockStored", "block_hashes": raw(_hashes(event.hashes)),
            "parent_block_hash": event.parent or None, "token_ids": raw(_ids(event.tokens)),
            "block_size": event.block_tokens, "lora_id": None, "medium": event.place.medium, "lora_name": None,
        }  # fmt: skip
    if event.group:
        packed["group_idx"] = event.group
    if event.place.locality:
        packed["locality"] = event.place.locality
    return packed


def _as_array(event: Stored | Removed | Cleared, raw: Raw) -> Event:
    if isinstance(event, Cleared):
        return ["AllBlocksCleared"]
    group, locality = event.group or None, event.place.locality or None
    if isinstance(event, Removed):
        packed: list[Any] = ["BlockRemoved", raw(_hashes(event.hashes)), event.place.medium]
        further = [group, locality]
    else:
        packed = [
            "BlockStored", raw(_hashes(event.hashes)), event.parent or None, raw(_ids(event.tokens)),
            event.block_tokens, None, event.place.medium, None,
        ]  # fmt: skip
        further = [None, group, None, None, locality]  # extra keys, group, kind of cache, its window, locality
    if group is not None or locality is not None:
        packed += further
    return packed
