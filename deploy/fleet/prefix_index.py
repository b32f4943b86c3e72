"""Says which node has how much of a prompt, by the KV events of the nodes' daemons. Pure: no socket, no clock.

A block is named by the block before it and its token ids. Only what a node has itself counts: what lies in the store
that all share can be had by every node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Block = tuple[int | None, tuple[int, ...]]  # the hash before it, its tokens
REMOTE = "REMOTE"


class PrefixIndex:
    """Events of one node."""

    def __init__(self) -> None:
        self._hashes: dict[Block, int] = {}
        self._blocks: dict[int, Block] = {}
        self._places: dict[int, set[tuple[str, str]]] = {}
        self._block_tokens = 0

    def __len__(self) -> int:
        return len(self._places)

    def apply(self, event: Mapping[str, Any]) -> None:
        """An event of the encoding `map`."""
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self._hashes.clear()
            self._blocks.clear()
            self._places.clear()
        elif kind == "BlockStored":
            self._stored(event)
        elif kind == "BlockRemoved":
            for each in event["block_hashes"]:
                self._removed(each, _place_of(event))

    def leading_tokens(self, prompt: Sequence[int]) -> int:
        """Tokens at the front of the prompt whose blocks the node has."""
        size, parent, found = self._block_tokens, None, 0
        while size and found + size <= len(prompt):
            name = self._hashes.get((parent, tuple(prompt[found : found + size])))
            if name is None or all(locality == REMOTE for _, locality in self._places[name]):
                break
            parent, found = name, found + size
        return found

    def _stored(self, event: Mapping[str, Any]) -> None:
        parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
        for number, each in enumerate(event["block_hashes"]):
            if tokens:
                self._block_tokens = size
                self._blocks[each] = parent, tuple(tokens[number * size : (number + 1) * size])
                self._hashes[self._blocks[each]] = each
            self._places.setdefault(each, set()).add(_place_of(event))
            parent = each

    def _removed(self, name: int, place: tuple[str, str]) -> None:
        places = self._places.get(name, set())
        places.discard(place)
        if not places and name in self._places:
            del self._places[name]
            block = self._blocks.pop(name, None)
            if block is not None:
                self._hashes.pop(block, None)


def _place_of(event: Mapping[str, Any]) -> tuple[str, str]:
    return event.get("medium") or "", event.get("locality") or ""
