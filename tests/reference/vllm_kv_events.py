"""vLLM's event classes and a subscriber, transcribed: what any consumer with vLLM's decoder makes of a stream.

`Map*`: vllm/distributed/kv_events.py of vLLM 0.24 and later (pull request 42892), the batch an array, events maps.
`Array*`: the messages of 0.14 to 0.23, all arrays. Field order and defaults are theirs.
"""

from __future__ import annotations

from typing import Any

import msgspec

Hash = bytes | int
Key = tuple[str, str]  # medium, locality


class MapEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class MapBlockStored(MapEvent, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class MapBlockRemoved(MapEvent, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class MapAllBlocksCleared(MapEvent, tag="AllBlocksCleared"):
    pass


class MapBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[MapBlockStored | MapBlockRemoved | MapAllBlocksCleared]
    data_parallel_rank: int | None = None


class ArrayEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class ArrayBlockStored(ArrayEvent, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class ArrayBlockRemoved(ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None


class ArrayAllBlocksCleared(ArrayEvent, tag="AllBlocksCleared"):
    pass


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[ArrayBlockStored | ArrayBlockRemoved | ArrayAllBlocksCleared]
    data_parallel_rank: int | None = None


DECODERS = {"map": msgspec.msgpack.Decoder(MapBatch), "array": msgspec.msgpack.Decoder(ArrayBatch)}


class Subscriber:
    """One topic's events applied to a plain model: by place, each hash with its parent and its tokens."""

    def __init__(self, encoding: str = "map") -> None:
        self._decode = DECODERS[encoding].decode
        self.blocks: dict[Key, dict[Hash, tuple[Hash | None, tuple[int, ...]]]] = {}
        self.last = -1

    def apply(self, number: int, payload: bytes) -> None:
        for event in self._decode(payload).events:
            name = type(event).__struct_config__.tag
            if name == "AllBlocksCleared":
                self.blocks.clear()
                continue
            place = self.blocks.setdefault((event.medium or "", getattr(event, "locality", None) or ""), {})
            if name == "BlockRemoved":
                for each in event.block_hashes:
                    place.pop(each, None)
                continue
            parent, size = event.parent_block_hash, event.block_size
            assert len(event.token_ids) in (0, size * len(event.block_hashes)), event
            for at, each in enumerate(event.block_hashes):
                place[each] = parent, tuple(event.token_ids[at * size : (at + 1) * size])
                parent = each
        self.last = number

    def misses(self, number: int) -> bool:
        """Return whether batches are lost between the last one and this one."""
        return number > self.last + 1

    def held(self) -> dict[Key, dict[Hash, tuple[Hash | None, tuple[int, ...]]]]:
        return {place: blocks for place, blocks in self.blocks.items() if blocks}
