"""The bookkeeping of groups against vLLM's own managers of its pool, without an engine: whatever sizes steps have, each
block is ordered while its request holds it, and named as released before vLLM gives its memory away.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-vllm runs these")

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvstore_connectors.vllm.group_orders import GroupOrders, GroupsOfRequest
from kvstore_connectors.vllm.groups import state_groups
from kvstore_connectors.vllm.orders import RequestPrefix

BLOCK, WINDOW, TOKENS, POOL = 16, 40, 400, 120
ATTENTION: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=BLOCK, **ATTENTION)
SLIDING = SlidingWindowSpec(block_size=BLOCK, sliding_window=WINDOW, **ATTENTION)
WIDE = SlidingWindowSpec(block_size=2 * BLOCK, sliding_window=WINDOW, **ATTENTION)
STATE = MambaSpec(
    block_size=BLOCK, shapes=((3, 8), (2, 4)), dtypes=(torch.bfloat16, torch.float32), mamba_cache_mode="align"
)
MODELS: dict[str, list[Any]] = {
    "sliding and full": [SLIDING, FULL],
    "two head sizes": [WIDE, WIDE, FULL],
    "states first": [STATE, STATE, FULL],
}


def manager_of(specs: list[Any]) -> tuple[KVCacheConfig, KVCacheManager]:
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks=POOL, kv_cache_tensors=[], kv_cache_groups=groups)
    size = max(spec.block_size for spec in specs)
    return config, KVCacheManager(config, max_model_len=1024, scheduler_block_size=size, hash_block_size=BLOCK)


def orders_of(config: KVCacheConfig, manager: KVCacheManager) -> GroupOrders:
    managers = manager.coordinator.single_type_managers
    return GroupOrders(state_groups(config), lambda group, tokens: int(managers[group].get_num_skipped_tokens(tokens)))


def request_of() -> Request:
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request("r", list(range(TOKENS)), SamplingParams(max_tokens=1), None, block_hasher=hasher)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(5))
def test_no_block_is_given_away_before_it_is_ordered_and_released(model: str, seed: int) -> None:
    init_none_hash(sha256)
    config, manager = manager_of(MODELS[model])
    orders, request = orders_of(config, manager), request_of()
    groups = orders.groups
    state, random = GroupsOfRequest([0] * len(groups.groups)), np.random.default_rng(seed)
    held: dict[tuple[int, int], int] = {}  # by vLLM's group and index: what was ordered and is not released
    blocks: dict[int, set[int]] = {group.number: set() for group in groups.groups}
    computed, ends = 0, set[int]()
    while computed < TOKENS:
        most = groups.block_tokens * int(random.integers(1, 5)) if model == "states first" else random.integers(1, 120)
        tokens = int(min(most, TOKENS - computed))
        manager.new_step_starts()
        assert manager.allocate_slots(request, tokens) is not None
        tables = manager.get_block_ids("r")
        offers = manager.take_boundary_state_offloads().get("r", [])
        released = set(orders.released(state, computed))
        for (member, index), block_id in list(held.items()):
            if block_id in released:
                del held[member, index]
            else:
                assert tables[member][index] == block_id, "given away, and not released"
        computed += tokens
        ends.add(computed)
        for order in orders.saves("r", state, computed, tables, offers, lambda _: RequestPrefix(b"")):
            group = groups.groups[order.group]
            for block, place in enumerate(order.block_ids[order.first_block :], order.first_block):
                assert isinstance(place, tuple) and place == group.place(tables, block) and any(place)
                blocks[order.group].add(block)
        for member, waiting in state.exposed.items():
            held |= {(member, index): block_id for index, block_id in waiting}
        request.num_computed_tokens = computed
    whole = set(range(TOKENS // groups.block_tokens))
    for group in groups.groups:
        at_ends = {end // groups.block_tokens - 1 for end in ends if end % groups.block_tokens == 0}
        assert blocks[group.number] == (at_ends if group.kind == "recurrent" else whole)


@pytest.mark.parametrize("model", MODELS)
def test_vllm_has_memory_for_all_that_is_loaded(model: str) -> None:
    init_none_hash(sha256)
    for boundary in (1, 3, 7):
        config, manager = manager_of(MODELS[model])
        orders, request = orders_of(config, manager), request_of()
        loaded = boundary * orders.groups.block_tokens
        prefix = RequestPrefix(np.arange(loaded, dtype="<i4").tobytes())
        assert manager.allocate_slots(request, 0, num_external_computed_tokens=loaded, delay_cache_blocks=True)
        tables = manager.get_block_ids("r")
        used = {block_id for table in tables for block_id in table} - {0}
        written = set()
        for order in orders.loads("r", prefix, tables, 0, 1.0):
            for place in order.block_ids:
                assert isinstance(place, tuple)
                written |= set(place)
        assert written - {0} == used, "all that vLLM gave for the load, and nothing else"
