"""Make the orders for models with several groups of layers, or whose blocks leave the pool while a request runs.

The module owns the bookkeeping of one request: the blocks of each group that were ordered to be stored, and the pool
blocks among them that the request still holds. vLLM gives a block that left the window, or a state that is not needed
any more, to others at once, often to other groups of the same request; so a block is ordered in the step that fills it,
and named as released when vLLM may give it away. All of a boundary is loaded, beside the steps, or nothing: vLLM cannot
take back a part. The module reads vLLM's records by attribute and imports nothing of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore_client.results import Lookup
from kvstore_connectors.vllm.groups import Skipped, StateGroup, StateGroups
from kvstore_connectors.vllm.orders import LoadOrder, Place, RequestPrefix, SaveOrder

_ABSENT = "absent"
Tables = Sequence[Sequence[int]]
Offers = Iterable[tuple[int, int, int]]
PrefixOf = Callable[[int], RequestPrefix]


@dataclass(slots=True)
class GroupsOfRequest:
    """The bookkeeping of one request with several layer groups. `stored` has for each group the number of leading
    blocks for which no order to store is needed any more. `exposed` has for each of vLLM's groups the pool blocks that
    were ordered to be stored and are not yet released, each with its index in the group's block table.
    """

    stored: list[int]
    exposed: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)

    def taken_back(self, blocks: int) -> None:
        """Note that vLLM has freed all pool blocks of the request except the first `blocks` blocks of each group."""
        self.stored = [min(each, blocks) for each in self.stored]
        self.exposed.clear()


@dataclass(frozen=True, slots=True)
class Survey:
    """A record of which blocks of a prefix are stored by every shard of the model, for each layer group (`present`).
    `load_s` has the seconds that each block takes to be mapped, and `tiers` the slowest tier that has each block.
    """

    groups: StateGroups
    present: list[list[bool]]
    load_s: list[list[float]]
    tiers: tuple[str, ...]

    def reach(self, local: int, most: int, skipped: Skipped) -> int:
        """Return the longest boundary, in blocks and at most `most`, after which vLLM can continue the request. Return
        `local`, the number of blocks that vLLM holds itself, if no longer boundary can be restored. `skipped(group,
        tokens)` is vLLM's rule: how many tokens the group does not need then.
        """
        return self.groups.resume_point([blocks[:most] for blocks in self.present], local, most, skipped)

    def found(self, local: int, most: int, skipped: Skipped) -> Lookup:
        """Return the longest boundary after which vLLM can continue the request, as `reach` does, in the form of a
        lookup's result with tiers and seconds of loading.
        """
        blocks = self.reach(local, most, skipped)
        firsts = (max(local, self.groups.first_needed(group, blocks, skipped)) for group in self.groups.groups)
        load_s = sum(sum(each[first:blocks]) for each, first in zip(self.load_s, firsts, strict=True))
        return Lookup(blocks, blocks * self.groups.block_tokens, self.tiers[:blocks], load_s)


def survey(groups: StateGroups, answers: Sequence[Sequence[Lookup]], most: int) -> Survey:
    """Return which blocks of each layer group all shards have stored. `answers[shard][group]` is the lookup of one
    shard for one group; all are about the first `most` blocks of one prompt.
    """
    present = [[True] * most for _ in groups.groups]
    load_s = [[0.0] * most for _ in groups.groups]
    tiers = ["host"] * most
    for shard in answers:
        for number, answer in enumerate(shard):
            for block in range(most):
                tier = answer.tiers[block] if block < len(answer.tiers) else _ABSENT
                present[number][block] &= tier != _ABSENT
                if tier not in (_ABSENT, "host"):
                    tiers[block] = tier
            for block, each in enumerate(answer.load_s):
                load_s[number][block] = max(load_s[number][block], each)
    return Survey(groups, present, load_s, tuple(tiers))


class GroupOrders:
    """A maker of orders to load and to save blocks, for the requests of an engine with several layer groups.
    `skipped(group, tokens)` is vLLM's rule: how many leading tokens a group no longer needs after `tokens` tokens.
    """

    def __init__(self, groups: StateGroups, skipped: Skipped) -> None:
        self.groups, self.skipped = groups, skipped

    def loads(
        self, request_id: str, prefix: RequestPrefix, tables: Tables, computed_tokens: int, deadline_s: float
    ) -> list[LoadOrder]:
        """Return the orders to load the blocks that a request needs to continue at the end of `prefix`. vLLM holds the
        state of the first `computed_tokens` tokens itself, and `tables` are the block tables of its groups. A load may
        take `deadline_s` seconds.
        """
        size = self.groups.block_tokens
        boundary, local = len(prefix.tokens) // 4 // size, computed_tokens // size
        orders = []
        for group in self.groups.groups:
            first = max(local, self.groups.first_needed(group, boundary, self.skipped))
            places = tuple(group.place(tables, block, computed_tokens) for block in range(first, boundary))
            orders.append(LoadOrder(request_id, prefix, first, places, deadline_s, group.number))
        return orders

    def saves(
        self, request_id: str, state: GroupsOfRequest, end: int, tables: Tables, offers: Offers, prefix_of: PrefixOf
    ) -> Iterator[SaveOrder]:
        """Yield the orders to store the blocks that a step fills, after which `end` tokens of the request are computed.
        `tables` are the block tables of vLLM's groups. `offers` are the recurrent states that vLLM keeps by itself, as
        (group, pool block, tokens).
        """
        full = end // self.groups.block_tokens
        for group in self.groups.groups:
            first = state.stored[group.number]
            if group.kind == "recurrent":
                places = self._states(group, first, end, tables, offers)
            else:
                places = {block: group.place(tables, block) for block in range(first, full)}
            for run in self._runs(group, places):
                found = tuple(places[block] for block in run)
                # An order may begin with blocks that an earlier one could not store, if they stay in the pool.
                before = range(run[0])
                ids: tuple[Place, ...] = tuple(group.place(tables, block) if group.stays else () for block in before)
                ids += found
                if not group.stays:
                    self._expose(state, group, run, found)
                yield SaveOrder(request_id, prefix_of(run[-1] + 1), run[0], ids, group.number, group.stays)
            state.stored[group.number] = max(first, full)

    def released(self, state: GroupsOfRequest, computed_tokens: int) -> Iterator[int]:
        """Yield the ids of pool blocks that were ordered to be stored and that vLLM may have freed since. vLLM frees
        them when it schedules the tokens behind the first `computed_tokens` tokens.
        """
        for member, waiting in state.exposed.items():
            if not waiting:
                continue
            gone = self.skipped(member, computed_tokens) // self._tokens_of(member)
            while waiting and waiting[0][0] < gone:
                yield waiting.popleft()[1]

    def _tokens_of(self, member: int) -> int:
        return next(int(group.spec.block_size) for group in self.groups.groups if member in group.members)

    def _states(
        self, group: StateGroup, first: int, end: int, tables: Tables, offers: Offers
    ) -> dict[int, tuple[int, ...]]:
        """Return the places of the states at ends of blocks from `first` on: where vLLM offers them, and the one at the
        end of the step, which it may not keep.
        """
        found: dict[int, dict[int, int]] = {}
        full, rest = divmod(end, self.groups.block_tokens)
        if not rest and full > first:
            found[full - 1] = dict(zip(group.members, group.place(tables, full - 1), strict=True))
        for member, block_id, tokens in offers:
            block, rest = divmod(tokens, self.groups.block_tokens)
            if member in group.members and not rest and first < block <= full:
                found.setdefault(block - 1, {})[member] = block_id
        return {
            block: tuple(ids[member] for member in group.members)
            for block, ids in sorted(found.items())
            if len(ids) == len(group.members)
        }

    def _runs(self, group: StateGroup, places: dict[int, tuple[int, ...]]) -> Iterator[list[int]]:
        """Yield runs of consecutive blocks that are in the pool as a whole."""
        run: list[int] = []
        for block, place in places.items():
            is_whole = self.groups.is_whole(group, block, place, self.skipped)
            if run and (not is_whole or block != run[-1] + 1):
                yield run
                run = []
            if is_whole:
                run.append(block)
        if run:
            yield run

    def _expose(
        self, state: GroupsOfRequest, group: StateGroup, run: Sequence[int], places: Sequence[tuple[int, ...]]
    ) -> None:
        for block, place in zip(run, places, strict=True):
            first = (block + 1) * group.ratio - group.pieces
            for at, block_id in enumerate(place):
                member, piece = divmod(at, group.pieces)
                if block_id:
                    state.exposed.setdefault(group.members[member], deque()).append((first + piece, block_id))
