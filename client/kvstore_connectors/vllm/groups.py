"""Map vLLM's KV cache groups to layer groups of the store, and say which blocks a request needs at a boundary.

vLLM divides a model's layers into groups of one block table each, often several for one kind of state, and their blocks
may have different sizes. Here a group of the store has all of vLLM's groups with one specification, and every group has
blocks of the same tokens: the least common multiple of vLLM's. Which blocks a boundary needs is vLLM's own rule
(`get_num_skipped_tokens` of its managers), by which it also allocates. The module reads by attribute and imports
nothing of vLLM. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore_connectors.vllm.specs import SpecKind, kind_of

Skipped = Callable[[int, int], int]
"""The tokens that a group of vLLM's does not need behind some computed tokens."""


@dataclass(frozen=True, slots=True)
class StateGroup:
    """A layer group of the store. It combines the groups of vLLM that have the same specification `spec`: `members` are
    the numbers of these groups, and `layers` the names of their layers. One block of the store covers `ratio` pool
    blocks of each member.
    """

    number: int
    kind: SpecKind
    members: tuple[int, ...]
    layers: tuple[tuple[str, ...], ...]
    spec: Any
    ratio: int

    @property
    def pieces(self) -> int:
        """Return the number of pool blocks of each member that one block holds. A recurrent group has only the last
        one, with the state at the block's end.
        """
        return 1 if self.kind == "recurrent" else self.ratio

    @property
    def stays(self) -> bool:
        """Return whether the blocks of this group stay in vLLM's pool as long as their request runs."""
        return self.kind == "full"

    @property
    def window_tokens(self) -> int:
        return int(getattr(self.spec, "sliding_window", 0) or 0) if self.kind == "sliding" else 0

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one pool block in one layer, without padding."""
        if self.kind != "recurrent":
            return int(self.spec.page_size_bytes)
        parts = zip(self.spec.shapes, self.spec.dtypes, strict=True)
        return sum(math.prod(shape) * int(dtype.itemsize) for shape, dtype in parts)

    @property
    def layer_count(self) -> int:
        return sum(map(len, self.layers))

    @property
    def block_bytes(self) -> int:
        return self.layer_count * self.pieces * self.page_bytes

    def place(self, tables: Sequence[Sequence[int]], block: int, held_tokens: int = 0) -> tuple[int, ...]:
        """Return the ids of the pool blocks that make up the store's block number `block`, member after member, from
        vLLM's block `tables`. An id is 0 if the table has no such pool block, or if it belongs to the first
        `held_tokens` tokens, which vLLM's own prefix cache holds.
        """
        last = (block + 1) * self.ratio
        indices = range(last - self.pieces, last)
        held = held_tokens // int(self.spec.block_size)
        tables_of = [tables[member] for member in self.members]
        return tuple(ids[at] if held <= at < len(ids) else 0 for ids in tables_of for at in indices)


@dataclass(frozen=True, slots=True)
class StateGroups:
    """All layer groups of a model, full attention first. In every group a block of the store has `block_tokens`
    tokens.
    """

    groups: tuple[StateGroup, ...]
    block_tokens: int

    @property
    def is_plain(self) -> bool:
        """Return whether vLLM has one group of full attention. Only then can vLLM recompute single blocks of a load
        that failed.
        """
        return len(self.groups) == 1 and self.groups[0].stays and len(self.groups[0].members) == 1

    @property
    def bytes_a_block(self) -> int:
        """Return the bytes that a load moves for each block of a prefix, counted over the groups that need every
        block.
        """
        return sum(group.block_bytes for group in self.groups if group.stays) or self.groups[0].block_bytes

    def first_needed(self, group: StateGroup, boundary: int, skipped: Skipped) -> int:
        """Return the number of the first block of `group` that a request needs to continue after `boundary` blocks.
        `skipped(group, tokens)` is vLLM's rule: how many leading tokens a group does not need after `tokens` tokens.
        """
        tokens = boundary * self.block_tokens
        return min(skipped(group.members[0], tokens) // self.block_tokens, boundary)

    def is_whole(self, group: StateGroup, block: int, place: tuple[int, ...], skipped: Skipped) -> bool:
        """Return whether `place`, the ids of pool blocks for the store's block number `block`, has every pool block
        that a resume at the block's end may need. `skipped(group, tokens)` is vLLM's rule: how many leading tokens a
        group does not need then; pool blocks before that may be missing.
        """
        if group.kind == "recurrent":
            return all(place)
        tokens = (block + 1) * self.block_tokens
        gone = skipped(group.members[0], tokens) // int(group.spec.block_size) - block * group.pieces
        return all(place[at] or at % group.pieces < gone for at in range(len(place)))

    def resume_point(self, present: Sequence[Sequence[bool]], local: int, most: int, skipped: Skipped) -> int:
        """Return the largest number of blocks, at most `most`, after which a request can continue that holds the first
        `local` blocks itself. Return `local` if no longer prefix can be restored. `present` says for each group which
        of the first `most` blocks are stored. `skipped(group, tokens)` is vLLM's rule: how many leading tokens a group
        does not need then.
        """
        reach = [_runs(blocks) for blocks in present]
        for boundary in range(most, local, -1):
            firsts = (max(local, self.first_needed(group, boundary, skipped)) for group in self.groups)
            if all(runs[boundary] >= boundary - first for runs, first in zip(reach, firsts, strict=True)):
                return boundary
        return local


def state_groups(kv_cache_config: Any) -> StateGroups:
    """Return the layer groups of an engine, from vLLM's KVCacheConfig. The caller has checked that all of its
    specifications are known (`specs.unknown_spec`).
    """
    vllms = kv_cache_config.kv_cache_groups
    numbers = getattr(kv_cache_config, "prefix_cacheable_group_ids", None)
    alike: dict[str, list[int]] = {}
    for number in range(len(vllms)) if numbers is None else numbers:
        alike.setdefault(repr(vllms[number].kv_cache_spec), []).append(number)
    order = ("full", "sliding", "recurrent")
    ordered = sorted(alike.values(), key=lambda members: order.index(_kind(vllms[members[0]].kv_cache_spec)))
    block_tokens = math.lcm(*(int(vllms[members[0]].kv_cache_spec.block_size) for members in ordered))
    groups = []
    for number, members in enumerate(ordered):
        spec = vllms[members[0]].kv_cache_spec
        layers = tuple(tuple(vllms[member].layer_names) for member in members)
        ratio = block_tokens // int(spec.block_size)
        groups.append(StateGroup(number, _kind(spec), tuple(members), layers, spec, ratio))
    return StateGroups(tuple(groups), block_tokens)


def _kind(spec: Any) -> SpecKind:
    kind = kind_of(spec)
    assert kind is not None, "a refused specification"
    return kind


def _runs(present: Sequence[bool]) -> list[int]:
    """Return for each number of blocks how many consecutive ones, up to there, are present."""
    runs = [0]
    for is_present in present:
        runs.append(runs[-1] + 1 if is_present else 0)
    return runs
