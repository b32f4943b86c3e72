"""Several groups of layers in one pool: where a request may go on, what is stored before vLLM gives its memory away."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_connectors.vllm.groups import StateGroups
from kvstore_connectors.vllm.host_pages import PagedLayers
from kvstore_connectors.vllm.identity import address
from kvstore_connectors.vllm.model import describe_extras
from kvstore_connectors.vllm.orders import RequestPrefix, StepOrders
from kvstore_connectors.vllm.saver import Saver
from kvstore_connectors.vllm.scheduler import LoadRules, SchedulerSide
from kvstore_connectors.vllm.worker import VllmWorkerSide
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import pack_tokens
from kvstore_restore.choice import LoadChoice
from tests.reference.vllm_records import BLOCK_TOKENS, KeyedStore, group_spec, groups_of, request

WINDOW, PAGE, POOL, PATIENCE_S = 7, 4, 40, 20.0
FULL = group_spec("FullAttentionSpec")
SLIDING = group_spec("SlidingWindowSpec", sliding_window=WINDOW)
STATE = group_spec("MambaSpec", shapes=((PAGE,),), dtypes=(np.dtype(np.uint8),))
WIDE = group_spec("SlidingWindowSpec", sliding_window=WINDOW, block_size=2 * BLOCK_TOKENS)
MODELS = {
    "sliding and full": [SLIDING, FULL],
    "two head sizes": [WIDE, WIDE, FULL],
    "narrow windows": [SLIDING, group_spec("FullAttentionSpec", block_size=2 * BLOCK_TOKENS)],
    "states first": [STATE, STATE, FULL],
    "sliding alone": [SLIDING],
}


def skipped_of(specs: list[Any]) -> Any:
    """vLLM's rule, as its managers have it."""

    def skipped(group: int, tokens: int) -> int:
        kind = type(specs[group]).__name__
        if kind == "MambaSpec":
            return tokens - 1
        return max(tokens - WINDOW + 1, 0) if kind == "SlidingWindowSpec" else 0

    return skipped


def content(group: int, first_token: int, tokens: list[int]) -> bytes:
    """Return the bytes of a pool block of a group."""
    return bytes((group * 61 + first_token + sum(tokens[: first_token + 1]) + 7 * at) % 255 + 1 for at in range(PAGE))


class Pool:
    """vLLM's pool and tables of one request, by the rules of its managers: freed blocks are given away first."""

    def __init__(self, specs: list[Any]) -> None:
        self.specs, self.skipped = specs, skipped_of(specs)
        self.memory = np.zeros((POOL, PAGE), np.uint8)
        self.memory[0] = 255  # block 0 is nobody's
        self.free = deque(range(1, POOL))
        self.tables: list[list[int]] = [[] for _ in specs]

    def schedule(self, computed: int, tokens: int) -> None:
        for group, table in enumerate(self.tables):
            gone = self.skipped(group, computed) // self.specs[group].block_size
            for at in range(min(max(gone, 0), len(table))):
                if table[at]:
                    self.free.appendleft(table[at])
                    table[at] = 0
        for group, table in enumerate(self.tables):
            is_state = type(self.specs[group]).__name__ == "MambaSpec"
            wanted = -(-(computed + tokens) // self.specs[group].block_size)
            while len(table) < wanted:
                table.append(0 if is_state and len(table) < wanted - 1 else self.free.popleft())

    def load(self, boundary: int) -> None:
        """Tables for a load of `boundary` tokens."""
        for group, table in enumerate(self.tables):
            size = self.specs[group].block_size
            gone = max(self.skipped(group, boundary), 0) // size
            table += [0 if at < gone else self.free.popleft() for at in range(boundary // size)]

    def compute(self, computed: int, end: int, tokens: list[int]) -> None:
        for group, table in enumerate(self.tables):
            size = self.specs[group].block_size
            for at, block in enumerate(table):
                is_state = type(self.specs[group]).__name__ == "MambaSpec"
                is_filled = at == (end - 1) // size if is_state else computed < (at + 1) * size and at * size < end
                if block and is_filled:
                    shown = (end if is_state else (at + 1) * size) - 1
                    self.memory[block] = list(content(group, min(shown, len(tokens) - 1), tokens))


class Engine:
    def __init__(self, store: KeyedStore, model: str, choice: LoadChoice | None = None) -> None:
        self.specs = MODELS[model]
        self.groups: StateGroups = groups_of(*self.specs)
        self.pool, self.store = Pool(self.specs), store
        store.bytes_of = {group.number: group.block_bytes for group in self.groups.groups}
        pools = [
            PagedLayers(
                [self.pool.memory] * len(group.members) * group.pieces, range(len(group.members) * group.pieces)
            )
            for group in self.groups.groups
        ]
        pools[0].others = pools[1:]
        self.side = SchedulerSide(
            [store], lambda asked: describe_extras(asked, hashed_items=True), groups=self.groups, loads=True,
            saves=True, lookup_deadline_s=0.05, rules=LoadRules(choice, block_bytes=8),
        )  # fmt: skip
        self.side.use_rule(self.pool.skipped)
        self.saver = Saver(store, pools[0], deadline_s=5.0, say=print)
        self.worker = VllmWorkerSide(store, pools[0], self.saver, reuse_wait_s=PATIENCE_S, say=print)

    def step(self, tokens: list[int], computed: int, scheduled: int, name: str = "r") -> StepOrders:
        self.pool.schedule(computed, scheduled)
        end, size = computed + scheduled, BLOCK_TOKENS
        offers = [
            (group, table[end // size - 1], end)
            for group, table in enumerate(self.pool.tables)
            if type(self.specs[group]).__name__ == "MambaSpec" and end % size == 0
        ]
        state = SimpleNamespace(
            get_block_ids=lambda _: tuple(map(list, self.pool.tables)), boundary_state_offloads={name: offers}
        )
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=computed)],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens={name: scheduled},
            scheduled_spec_decode_tokens={},
            kv_connector_block_state=state,
        )
        orders = self.side.orders(output)
        self.worker.before_step(orders)
        self.pool.compute(computed, end, tokens)
        self.worker.save(orders.saves)
        return orders

    def run(self, tokens: list[int], steps: list[int]) -> None:
        """A request that hits nothing."""
        asked = request("r", tokens)
        self.side.matched_tokens(asked, 0)
        self.side.admitted(asked, 0, ())
        computed = 0
        for scheduled in steps:
            self.step(tokens, computed, scheduled)
            computed += scheduled
        self.side.finished(asked)

    def load(self, tokens: list[int]) -> tuple[int, set[str]]:
        """A request that waits for its load: the tokens that it hits, and the requests whose load failed."""
        asked = request("l", tokens)
        matched, is_beside = self.side.matched_tokens(asked, 0)
        assert is_beside == bool(matched), "vLLM can take a load back between steps alone"
        self.pool.load(matched)
        self.side.admitted(asked, matched, tuple(map(list, self.pool.tables)))
        output = SimpleNamespace(
            scheduled_new_reqs=[], scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens={},
        )  # fmt: skip
        orders = self.side.orders(output)
        self.worker.before_step(orders)
        self.worker.load_beside(orders.beside)
        ended: set[str] = set()
        while matched and not ended:
            ended = self.worker.take_ended()
        assert ended == ({"l"} if matched else set()) and self.worker.take_failed() == set()
        return matched, self.worker.take_failed_requests()

    def expected(self, group: int, block: int, tokens: list[int], *, whole: bool = True) -> bytes:
        """Return the bytes of a block of the store; without `whole`, the part that a request right behind it needs."""
        of_store, found = self.groups.groups[group], b""
        for member in of_store.members:
            for piece in range(of_store.pieces):
                end = (block + 1) * self.groups.block_tokens - (of_store.pieces - 1 - piece) * of_store.spec.block_size
                gone = self.pool.skipped(member, (block + 1) * self.groups.block_tokens) >= end
                is_gone = gone and of_store.kind != "recurrent" and not whole
                found += bytes(PAGE) if is_gone else content(member, end - 1, tokens)
        return found

    def stored(self, group: int, tokens: list[int]) -> list[bytes | None]:
        packed = np.array(tokens[: len(tokens) // self.groups.block_tokens * self.groups.block_tokens])
        named = self.store.keys(packed, group)
        assert named is not None
        return [found.tobytes() if (found := self.store.blocks.get(key)) is not None else None for key in named]


def store_for(model: str, **fields: Any) -> KeyedStore:
    return KeyedStore(block_tokens=groups_of(*MODELS[model]).block_tokens, **fields)


TOKENS = [3 + at * 5 % 97 for at in range(64)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("steps", [[64], [8] * 8, [24, 8, 32], [8, *[1] * 56]])
def test_each_block_is_stored_as_its_step_filled_it_though_vllm_gives_it_away_at_once(
    model: str, steps: list[int]
) -> None:
    engine = Engine(store_for(model), model)
    engine.run(TOKENS, steps)
    assert engine.saver.drain(PATIENCE_S)
    size, ends = engine.groups.block_tokens, set(np.cumsum(steps).tolist())
    for group in engine.groups.groups:
        for block, found in enumerate(engine.stored(group.number, TOKENS)):
            if group.kind == "recurrent" and (block + 1) * size not in ends:
                assert found is None, "a state in the middle of a step is nowhere"
            else:
                assert found in (
                    engine.expected(group.number, block, TOKENS),
                    engine.expected(group.number, block, TOKENS, whole=False),
                ), (group, block)


@pytest.mark.parametrize("model", MODELS)
def test_a_second_engine_goes_on_at_any_boundary_with_what_each_group_needs(model: str) -> None:
    store = store_for(model)
    first = Engine(store, model)
    size = first.groups.block_tokens
    first.run(TOKENS, [size] * (len(TOKENS) // size))
    assert first.saver.drain(PATIENCE_S)
    for shared in range(size, len(TOKENS), size):
        engine = Engine(store, model)
        matched, failed = engine.load(TOKENS[:shared] + [1] * 9)
        assert (matched, failed) == (shared // size * size, set())
        for member, (spec, table) in enumerate(zip(engine.specs, engine.pool.tables, strict=True)):
            for at, block in enumerate(table):
                if block and (at + 1) * spec.block_size <= matched:
                    assert engine.pool.memory[block].tobytes() == content(
                        member, (at + 1) * spec.block_size - 1, TOKENS
                    )
        assert engine.pool.memory[0].tolist() == [255] * PAGE


def test_a_copy_that_does_not_come_in_time_is_dropped_and_never_takes_what_came_later() -> None:
    store = store_for("sliding and full")
    engine, gate = Engine(store, "sliding and full"), threading.Event()
    store.before_fill = lambda: gate.wait(PATIENCE_S) and None
    engine.worker._reuse_wait_s = 0.0
    released = []
    asked = request("r", TOKENS)
    engine.side.matched_tokens(asked, 0)
    engine.side.admitted(asked, 0, ())
    for computed in range(0, 64, 8):
        released += engine.step(TOKENS, computed, 8).released
    assert released and 0 not in released
    gate.set()
    assert engine.saver.drain(PATIENCE_S)
    for group in (0, 1):
        for block, found in enumerate(engine.stored(group, TOKENS)):
            assert found in (None, engine.expected(group, block, TOKENS), bytes(PAGE)), "late is absent, never wrong"
    assert all(found is not None for found in engine.stored(0, TOKENS)), "a group that stays is not cut off"


@pytest.mark.parametrize("model", ["sliding and full", "two head sizes"])
def test_blocks_that_stay_in_the_pool_are_stored_later_if_the_store_refused_them(model: str) -> None:
    store = store_for(model)
    engine, size = Engine(store, model), groups_of(*MODELS[model]).block_tokens
    store.fail_with = KVStoreError(ErrorKind.INTERNAL, "for a while")
    asked = request("r", TOKENS)
    engine.side.matched_tokens(asked, 0)
    engine.side.admitted(asked, 0, ())
    for computed in range(0, 64, size):
        if computed == 2 * size:
            store.fail_with = None
        engine.step(TOKENS, computed, size)
        assert engine.saver.drain(PATIENCE_S)
    assert engine.stored(0, TOKENS) == [engine.expected(0, block, TOKENS) for block in range(64 // size)]


def test_a_block_that_is_missing_in_one_group_ends_the_hit_before_it_and_not_after_the_window() -> None:
    store = store_for("sliding and full")
    first = Engine(store, "sliding and full")
    first.run(TOKENS, [64])
    assert first.saver.drain(PATIENCE_S)
    packed = np.array(TOKENS)
    keys = list(store.keys(packed, 1) or ())
    del store.blocks[keys[5]]  # needed behind 6 and 7 blocks: a window of 7 tokens reaches two blocks back
    assert Engine(store, "sliding and full").side.matched_tokens(request("a", TOKENS[:29]), 0) == (20, True)
    assert Engine(store, "sliding and full").side.matched_tokens(request("b", TOKENS[:33]), 0) == (32, True)
    del store.blocks[list(store.keys(packed, 0) or ())[3]]
    assert Engine(store, "sliding and full").side.matched_tokens(request("c", TOKENS[:33]), 0) == (12, True)


def test_a_load_that_fails_in_part_is_taken_back_whole_and_not_tried_again() -> None:
    store = store_for("sliding and full")
    first = Engine(store, "sliding and full")
    first.run(TOKENS, [64])
    assert first.saver.drain(PATIENCE_S)
    engine = Engine(store, "sliding and full")
    store.leases_hold = False
    assert engine.load(TOKENS) == (60, {"l"})
    asked = engine.side._requests["l"].request
    assert engine.side.matched_tokens(asked, 0) == (0, False)


def test_what_vllms_own_cache_holds_is_neither_loaded_nor_overwritten() -> None:
    store = store_for("sliding and full")
    first = Engine(store, "sliding and full")
    first.run(TOKENS, [64])
    assert first.saver.drain(PATIENCE_S)
    engine = Engine(store, "sliding and full")
    asked = request("r", TOKENS[:30])
    assert engine.side.matched_tokens(asked, 16) == (12, True)
    tables = ([0] * 5 + [11, 12], [21, 22, 23, 24, 25, 26, 27])
    engine.side.admitted(asked, 12, tables)
    (full, sliding) = engine.side.orders(SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={},
    )).beside  # fmt: skip
    assert (full.group, full.first_block, full.block_ids) == (0, 4, ((25,), (26,), (27,)))
    assert (sliding.group, sliding.first_block, sliding.block_ids) == (1, 5, ((11,), (12,)))


@given(
    present=st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=2, max_size=2),
    local=st.integers(0, 9),
    most=st.integers(0, 9),
    model=st.sampled_from(["sliding and full", "states first"]),
)
def test_the_resume_point_is_the_longest_boundary_that_every_group_has(
    present: list[list[bool]], local: int, most: int, model: str
) -> None:
    groups, skipped = groups_of(*MODELS[model]), skipped_of(MODELS[model])

    def suits(boundary: int) -> bool:
        tokens = boundary * groups.block_tokens
        return all(
            block < local or here or (block + 1) * groups.block_tokens <= skipped(group.members[0], tokens)
            for group, blocks in zip(groups.groups, present, strict=True)
            for block, here in enumerate(blocks[:boundary])
        )

    found = groups.resume_point([blocks[:most] for blocks in present], local, most, skipped)
    assert found == max([local, *filter(suits, range(local + 1, most + 1))])


def test_groups_of_one_specification_are_stored_together_in_blocks_that_suit_all() -> None:
    groups = groups_of(*MODELS["two head sizes"])
    assert [(group.kind, group.members, group.pieces) for group in groups.groups] == [
        ("full", (2,), 2),
        ("sliding", (0, 1), 1),
    ]
    assert groups.block_tokens == 2 * BLOCK_TOKENS
    tables = [[0, 5], [0, 6], [1, 2, 3]]
    assert [groups.groups[0].place(tables, block) for block in (0, 1)] == [(1, 2), (3, 0)]
    assert groups.groups[1].place(tables, 1) == (5, 6)


def test_a_group_is_named_by_keys_of_its_own() -> None:
    store, prefix = KeyedStore(), RequestPrefix(pack_tokens(TOKENS[:8]))
    plain, other = address(store, prefix, 1), address(store, prefix, 1, 1)  # type: ignore[arg-type]
    assert plain is not None and other is not None and other["group"] == 1
    assert plain["keys"] != other["keys"] and "group" not in plain
