"""The example router's index: what a node has of a prompt, by its events."""

from __future__ import annotations

from typing import Any

from deploy.fleet.prefix_index import PrefixIndex

TOKENS = list(range(12))  # three blocks of four


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, **more: str) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": 4, "medium": "CPU", **more,
    }  # fmt: skip


def index_of(*events: dict[str, Any]) -> PrefixIndex:
    index = PrefixIndex()
    for event in events:
        index.apply(event)
    return index


def test_a_prompt_is_known_as_far_as_its_chain_is_stored() -> None:
    index = index_of(stored([1, 2], TOKENS[:8]), stored([3], TOKENS[8:], parent=2))
    assert index.leading_tokens(TOKENS) == 12
    assert index.leading_tokens(TOKENS[:11]) == 8, "whole blocks alone"
    assert index.leading_tokens([99, *TOKENS[1:]]) == 0
    assert index.leading_tokens(TOKENS[4:]) == 0, "the same tokens after others are another block"
    assert PrefixIndex().leading_tokens(TOKENS) == 0


def test_removed_blocks_end_the_chain_once_no_medium_has_them() -> None:
    index = index_of(stored([1, 2, 3], TOKENS), stored([2], TOKENS[4:8], parent=1, medium="STORAGE"))
    removed = {"type": "BlockRemoved", "block_hashes": [2], "medium": "CPU"}
    index.apply(removed)
    assert index.leading_tokens(TOKENS) == 12, "it is on NVMe still"
    index.apply({**removed, "medium": "STORAGE"})
    assert index.leading_tokens(TOKENS) == 4 and len(index) == 2
    index.apply({"type": "AllBlocksCleared"})
    assert index.leading_tokens(TOKENS) == 0 and len(index) == 0


def test_blocks_that_are_in_the_shared_store_alone_count_for_no_node() -> None:
    remote = {"medium": "STORAGE", "locality": "REMOTE"}
    index = index_of(stored([1, 2, 3], TOKENS), stored([1, 2, 3], [], **remote))
    index.apply({"type": "BlockRemoved", "block_hashes": [3], "medium": "CPU"})
    assert index.leading_tokens(TOKENS) == 8


def test_blocks_without_token_ids_are_kept_but_never_match() -> None:
    index = index_of(stored([1], []))
    assert len(index) == 1 and index.leading_tokens(TOKENS) == 0
