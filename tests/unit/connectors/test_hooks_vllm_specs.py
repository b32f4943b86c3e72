"""Whatever an engine's groups of layers keep, in whatever order: it is served or refused in one line, at the start."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_connectors.vllm.specs import all_specs, kind_of, unknown_spec
from kvstore_connectors.vllm_tier.engine import refusal

SERVED = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "ChunkedLocalAttentionSpec": "sliding",
    "MambaSpec": "recurrent",
}
REFUSED = ["CrossAttentionSpec", "EncoderOnlyAttentionSpec", "CircularBufferSpec", "HiSparseHotSpec", "SpecOfTomorrow"]


def spec(name: str, **fields: Any) -> Any:
    """A specification of a class of this name; only attention has heads."""
    heads = {} if name in ("MambaSpec", "HiSparseHotSpec") else {"num_kv_heads": 2, "head_size": 64}
    return type(name, (SimpleNamespace,), {})(block_size=16, **heads, **fields)


def uniform(*names: str) -> Any:
    """A group of layers that differ in what a specification says of them."""
    return spec("UniformTypeKVCacheSpecs", kv_cache_specs={f"l.{at}": spec(name) for at, name in enumerate(names)})


def cache_of(*specs: Any) -> Any:
    groups = [SimpleNamespace(layer_names=[f"layer.{at}"], kv_cache_spec=each) for at, each in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups, kv_cache_layout="LBHNC")


def engine() -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", calculate_kv_scales=False),
        parallel_config=SimpleNamespace(nnodes_within_dp=1),
    )


@pytest.mark.parametrize("first", SERVED)
@pytest.mark.parametrize("second", SERVED)
def test_an_engine_is_served_whatever_its_first_group_is(first: str, second: str) -> None:
    cache = cache_of(spec(first), spec(second), uniform(first, first))
    assert refusal(engine(), cache) == ""
    assert [kind_of(group.kv_cache_spec) for group in cache.kv_cache_groups] == [
        SERVED[first],
        SERVED[second],
        SERVED[first],
    ]
    assert [type(each).__name__ for each in all_specs(cache)] == [first, second, first, first]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_state_of_the_prompt_is_refused_wherever_it_is(name: str, place: int) -> None:
    specs = [spec("FullAttentionSpec"), spec("MambaSpec"), spec("SlidingWindowSpec")]
    specs[place] = uniform("FullAttentionSpec", name) if place == 1 else spec(name)
    refused = refusal(engine(), cache_of(*specs))
    assert name in refused and f"layer.{place}" in refused and refused.endswith("unset --kv-transfer-config")
    assert "\n" not in refused


def test_an_engine_without_a_cache_is_refused() -> None:
    assert "no KV cache at all" in refusal(engine(), cache_of())


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here: make test-vllm")
@pytest.mark.parametrize("mamba_first", [True, False])
def test_vllms_own_classes_are_known_and_their_packing_is_named(mamba_first: bool) -> None:
    import torch
    from vllm.v1 import kv_cache_interface as interface

    from kvstore_connectors.vllm.specs import packing

    attention = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    specs: list[Any] = [
        interface.MambaSpec(block_size=32, shapes=((2, 3), (4,)), dtypes=(torch.float32, torch.float32)),
        interface.SlidingWindowSpec(**attention, sliding_window=128),
        interface.MLAAttentionSpec(**(attention | {"num_kv_heads": 1, "head_size": 576})),
        interface.ChunkedLocalAttentionSpec(**attention, attention_chunk_size=64),
        interface.UniformTypeKVCacheSpecs(
            block_size=32,
            kv_cache_specs={
                "a": interface.FullAttentionSpec(**attention),
                "b": interface.FullAttentionSpec(**(attention | {"head_size": 80})),
            },
        ),
    ]
    cache = cache_of(*(specs if mamba_first else specs[::-1]))
    assert unknown_spec(cache) == ""
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    assert packing(config, cache).split()[0] == "CPU_ATTN" and "vec16" in packing(config, cache)
    assert packing(config, cache_of(specs[0])) == "CPU_ATTN without attention"
    cross = interface.CrossAttentionSpec(**attention)
    assert "another input than the tokens" in unknown_spec(cache_of(specs[0], cross))
