"""The bytes of a batch of events, as vLLM's decoders read them.

A batch is the array [time, events, rank]. `map`: each event is a map with its "type", as of vLLM 0.24; `array`: an
array that begins with the type, as before. Hashes are integers below 2**63, which every consumer's 64-bit type holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Event = Any
HASH_MASK = (1 << 63) - 1
Encode = Callable[[float, Sequence["Stored | Removed | Cleared"]], bytes]


class CopyPlace(NamedTuple):
    """The place of block copies, in the words of KV events (messages to routers): a medium such as "CPU". `locality` is
    "" for this node."""

    medium: str
    locality: str = ""


@dataclass(slots=True)
class Stored:
    """An event which says that consecutive blocks of one chain are stored. `parent` is the hash of the block before the
    first one, None at the start of a chain. `tokens` are the token ids of all the blocks, or empty."""

    place: CopyPlace
    parent: int | None
    block_tokens: int
    group: int
    hashes: list[int] = field(default_factory=list)
    tokens: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class Removed:
    place: CopyPlace
    group: int
    hashes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Cleared:
    pass


def hash_of(key: bytes) -> int:
    """Return the number below 2**63 that stands for the block `key` in events."""
    number = int.from_bytes(key, "big")
    return (number ^ number >> 64) & HASH_MASK


def encoder(encoding: str) -> Encode:
    """Return a function that encodes a batch of events; its arguments are the time in seconds and the events.
    `encoding` is "map" or "array"."""
    import msgspec

    pack, form = msgspec.msgpack.Encoder().encode, _as_map if encoding == "map" else _as_array

    def encode(time_s: float, events: Sequence[Stored | Removed | Cleared]) -> bytes:
        packed: bytes = pack([time_s, [form(event) for event in events], 0])
        return packed

    return encode


def _ids(tokens: bytearray) -> list[int]:
    return memoryview(tokens).cast("i").tolist()


def _as_map(event: Stored | Removed | Cleared) -> Event:
    if isinstance(event, Cleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, Removed):
        packed: dict[str, Any] = {
            "type": "BlockRemoved", "block_hashes": event.hashes, "medium": event.place.medium,
        }  # fmt: skip
    else:
        packed = {
            "type": "BlockStored", "block_hashes": event.hashes, "parent_block_hash": event.parent,
            "token_ids": _ids(event.tokens), "block_size": event.block_tokens, "lora_id": None,
            "medium": event.place.medium, "lora_name": None,
        }  # fmt: skip
    if event.group:
        packed["group_idx"] = event.group
    if event.place.locality:
        packed["locality"] = event.place.locality
    return packed


def _as_array(event: Stored | Removed | Cleared) -> Event:
    if isinstance(event, Cleared):
        return ["AllBlocksCleared"]
    group, locality = event.group or None, event.place.locality or None
    if isinstance(event, Removed):
        packed: list[Any] = ["BlockRemoved", event.hashes, event.place.medium]
        further = [group, locality]
    else:
        packed = [
            "BlockStored", event.hashes, event.parent, _ids(event.tokens), event.block_tokens, None,
            event.place.medium, None,
        ]  # fmt: skip
        further = [None, group, None, None, locality]  # extra keys, group, kind of cache, its window, locality
    if group is not None or locality is not None:
        packed += further
    return packed
