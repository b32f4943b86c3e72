"""The memory of models whose layers differ: what it takes into blocks, what it gives back, what it refuses."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference.examples import each_nth
from tests.reference.tiny_transformers import GROUPED, grouped_model, prompt

# isort: split
import torch
from transformers import DynamicCache, PreTrainedModel

import kvstore_connectors.transformers.fingerprint
from kvstore_connectors.moments import HostMoment
from kvstore_connectors.transformers import KVStoreCache, kvstore_session, model_fingerprint
from kvstore_connectors.transformers.group_blocks import BlocksToRead
from kvstore_connectors.transformers.group_memory import GroupMemory
from kvstore_connectors.transformers.self_test import failure_of
from kvstore_connectors.transformers.state import GroupedState, answer, state_of
from kvstore_proto.errors import KVStoreError
from kvstore_proto.fingerprint import LayerGroup

ALL_KINDS = pytest.mark.parametrize("kind", list(GROUPED))


def memory_of(model: PreTrainedModel, block_tokens: int) -> GroupMemory:
    state = state_of(model)
    assert isinstance(state, GroupedState)
    return GroupMemory(state, model.config, block_tokens)


def cache_of(model: PreTrainedModel, memory: GroupMemory) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.layers = list(memory.layers)
    return cache


def payloads(memory: GroupMemory, tokens: int) -> dict[tuple[int, int], np.ndarray[Any, Any]]:
    """The bytes of all blocks that a memory has now, by group and block."""
    found, size = {}, memory.block_tokens
    groups = {group.group_id: group for group in memory.state.groups}
    for run in memory.blocks_until(tokens, size, HostMoment(None)).runs(range(tokens // size)):
        assert run.group is not None
        for block, fill in enumerate(run.payloads, run.first):
            found[run.group, block] = np.full(_payload_bytes(groups[run.group], size), 0xAA, np.uint8)
            fill(found[run.group, block])
    return found


def _payload_bytes(group: LayerGroup, block_tokens: int) -> int:
    return len(group.layers) * group.layer_bytes(block_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@ALL_KINDS
def test_a_model_whose_layers_differ_passes_the_test_at_opening(kind: str, dtype: torch.dtype) -> None:
    assert failure_of(grouped_model(kind, dtype=dtype), None) == ""


@pytest.mark.parametrize("steps", each_nth([[30, 34, 1, 63, 64], [64, 64, 64], [192], [64, *[1] * 8, 56, 64]], 4))
@pytest.mark.parametrize(("kind", "size"), [*((kind, 0) for kind in GROUPED), ("gpt_oss", 64), ("gemma4_text", 48)])
def test_a_state_from_blocks_is_the_state_at_their_end(kind: str, size: int, steps: list[int]) -> None:
    """`size`: of blocks, 0 for the default; also of blocks that are longer than a window."""
    model, ids, at = grouped_model(kind), prompt(192), 0
    size = size or state_of(model).default_block_tokens()  # type: ignore[union-attr]
    memory = memory_of(model, size)
    cache, kept, blocks = cache_of(model, memory), DynamicCache(config=model.config), dict[Any, Any]()
    for count in steps:
        answer(model, ids[:, at : at + count], kept, 1, at)
        answer(model, ids[:, at : at + count], cache, 1, at)
        at += count
        assert memory.holds(at) and not memory.holds(at - 1) and not memory.holds(at + 1)
        blocks |= payloads(memory, at)
    assert at == 192
    restored, loaded = memory_of(model, size), dict[tuple[int, int], list[torch.Tensor]]()
    for group in memory.state.groups:
        needed = [blocks[group.group_id, block] for block in group.needed_blocks(at // size, size)]
        read = BlocksToRead(group, needed, size, torch.device("cpu"))
        read.fill_all()
        loaded |= {(group.group_id, layer): rows for layer, rows in read.rows.items()}
    restored.install(at, 0, loaded)
    assert restored.holds(at)
    following = prompt(200, seed=3)[:, at:]
    ours, theirs = (answer(model, following, each, 8, at) for each in (cache_of(model, restored), kept))
    assert torch.equal(ours, theirs)


def test_a_state_is_kept_only_where_a_call_ended_and_a_window_where_its_rows_are_there() -> None:
    model, ids = grouped_model("falcon_h1"), prompt(200)
    memory = memory_of(model, 64)
    cache = cache_of(model, memory)
    answer(model, ids[:, :128], cache, 1)
    assert sorted(payloads(memory, 128)) == [(0, 0), (0, 1), (1, 1)]
    model = grouped_model("gpt_oss")
    memory = memory_of(model, 8)
    cache = cache_of(model, memory)
    answer(model, ids[:, :64], cache, 1)  # not seen by the memory, as while no daemon was there
    answer(model, ids[:, 64:80], cache, 1, 64)
    found = payloads(memory, 80)
    assert sorted(block for group, block in found if group == 0) == list(range(10))
    assert sorted(block for group, block in found if group == 1) == [6, 7, 8, 9]  # 16 tokens, and 19 before them


def test_blocks_that_are_stored_are_let_go() -> None:
    model = grouped_model("falcon_h1")
    memory = memory_of(model, 64)
    answer(model, prompt(128), cache_of(model, memory), 1)
    blocks = memory.blocks_until(128, 64, HostMoment(None))
    blocks.stored(range(1))
    assert [(run.group, run.first, len(run.payloads)) for run in blocks.runs(range(2))] == [(0, 0, 2), (1, 1, 1)]
    blocks.stored(range(2))
    assert blocks.runs(range(2)) == []


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next", "deepseek_v3"])
def test_a_fingerprint_says_the_groups_and_the_release(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = grouped_model(kind)
    fingerprint = model_fingerprint(model)
    kinds = {
        "gemma3_text": [("full", 0, 8), ("sliding", 24, 8)],
        "qwen3_next": [("full", 0, 64), ("recurrent", 0, 64)],
        "deepseek_v3": [("latent", 0, 8)],
    }
    found = [(group.kind, group.window_tokens, fingerprint.block_tokens) for group in fingerprint.groups]
    assert found == kinds[kind]
    assert model_fingerprint(grouped_model(kind)).digest() == fingerprint.digest()
    # Transformers replaces its own module when its first model is loaded, so `import transformers` here may be another.
    monkeypatch.setattr(kvstore_connectors.transformers.fingerprint.transformers, "__version__", "5.99.0")
    assert model_fingerprint(grouped_model(kind)).digest() != fingerprint.digest()


def test_blocks_that_end_where_no_state_can_be_are_refused(tmp_path: Path) -> None:
    model = grouped_model("bamba", mamba_chunk_size=96)
    assert model_fingerprint(model).block_tokens == 192  # of the chunks 64 and 96
    with pytest.raises(KVStoreError, match="block_tokens=64 is no multiple of 192"):
        kvstore_session(model, tmp_path, block_tokens=64)


def test_large_states_are_kept_at_fewer_boundaries() -> None:
    small, large = grouped_model("falcon_h1"), grouped_model("falcon_h1", mamba_d_state=256)
    assert model_fingerprint(small).block_tokens == 64
    assert model_fingerprint(large).block_tokens == 128


@ALL_KINDS
def test_a_deep_copy_is_a_plain_cache_that_goes_on_alike(kind: str, tmp_path: Path) -> None:
    model, ids = grouped_model(kind), prompt(100)
    with kvstore_session(model, tmp_path) as session, torch.no_grad():
        cache = KVStoreCache(session, model)
        model(ids[:, :90], past_key_values=cache, logits_to_keep=1)
        copy = deepcopy(cache)
        assert type(copy) is DynamicCache and not any("Shown" in type(layer).__name__ for layer in copy.layers)
        ours = answer(model, ids[:, 90:], cache, 10, 90)
        assert torch.equal(ours, answer(model, ids[:, 90:], copy, 10, 90))


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_call_that_ended_halfway_leaves_no_cache_to_go_on_with(
    kind: str, error: type[BaseException], tmp_path: Path
) -> None:
    model, ids = grouped_model(kind), prompt(60)

    def interrupt(*_: Any) -> None:
        raise error("in the middle")

    with kvstore_session(model, tmp_path) as session, torch.no_grad():
        cache = KVStoreCache(session, model)
        model(ids[:, :40], past_key_values=cache, logits_to_keep=1)
        hook = model.model.layers[2].register_forward_pre_hook(interrupt)
        with pytest.raises(error, match="in the middle"):
            model(ids[:, 40:], past_key_values=cache, logits_to_keep=1)
        hook.remove()
        for _ in range(2):
            with pytest.raises(KVStoreError, match="make a new cache"):
                model(ids[:, 40:], past_key_values=cache, logits_to_keep=1)
        cache.reset()
        plain = answer(model, ids, DynamicCache(config=model.config), 1)
        assert torch.equal(model(ids, past_key_values=cache, logits_to_keep=1).logits[0].float(), plain)


def test_a_latent_goes_back_like_full_attention(tmp_path: Path) -> None:
    model, ids = grouped_model("deepseek_v3"), prompt(60)
    with kvstore_session(model, tmp_path) as session, torch.no_grad():
        cache = KVStoreCache(session, model)
        model(ids, past_key_values=cache, logits_to_keep=1)
        cache.crop(-20)
        assert cache.get_seq_length() == 40 and cache.report.store_reason == ""
        kept = DynamicCache(config=model.config)
        model(ids, past_key_values=kept, logits_to_keep=1)
        kept.crop(-20)
        assert torch.equal(answer(model, ids[:, 40:], cache, 20, 40), answer(model, ids[:, 40:], kept, 20, 40))
