"""vLLM's configuration gives a fingerprint: what differs never shares a block, what cannot be served is refused."""

from __future__ import annotations

import copy
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore_connectors.vllm.identity import Extras, MediaItem
from kvstore_connectors.vllm.model import (
    describe_extras,
    find_weights,
    model_fingerprint,
    refusal,
    refused_backends,
    weights_digest,
)
from tests.reference.vllm_records import group_spec, image, request


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's, which the hook recognises by its name."""


def configuration() -> tuple[Any, Any]:
    settings = {"hidden_size": 576, "rope_theta": 10000.0, "_name_or_path": "/here", "transformers_version": "5"}
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="/models/small",
            dtype="torch.bfloat16",
            quantization=None,
            revision=None,
            hf_config=SimpleNamespace(settings=settings, to_dict=lambda: dict(settings)),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        device_config=SimpleNamespace(device_type="cpu"),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
    )
    spec = FullAttentionSpec(
        block_size=128, num_kv_heads=3, head_size=64, dtype="torch.bfloat16", page_size_bytes=128 * 3 * 64 * 2 * 2
    )
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{number}" for number in range(30)])
    return vllm_config, SimpleNamespace(kv_cache_groups=[group], kv_cache_layout="LBHNC", num_blocks=10)


def fingerprint(config: tuple[Any, Any], **changed: Any) -> Any:
    stated = {"weights": "w", "packing": "CPU_ATTN vec", "version": "0.32.0", "rank": 0}
    return model_fingerprint(*config, **(stated | changed))


def test_a_block_has_every_layer_of_its_tokens() -> None:
    made = fingerprint(configuration())
    assert made.payload_bytes() == 30 * 128 * 3 * 64 * 2 * 2
    assert (made.block_tokens, made.engine_block_tokens, made.kv_dtype, made.key_hash) == (
        128, 128, "bfloat16", "blake2b",
    )  # fmt: skip


def test_several_groups_are_in_the_fingerprint_with_what_each_needs() -> None:
    config = configuration()
    plain = fingerprint(config)
    another(config, "SlidingWindowSpec", page_size_bytes=1024)
    another(
        config, "MambaSpec", mamba_cache_mode="align", shapes=((3,), (5, 2)), dtypes=(np.dtype("i2"), np.dtype("f4"))
    )
    config[1].kv_cache_groups[0].kv_cache_spec.head_size_v = 64
    assert refusal(*config) == ""
    made = fingerprint(config)
    assert [(group.kind, group.window_tokens, len(group.layers)) for group in made.groups] == [
        ("full", 0, 30), ("sliding", 256, 1), ("recurrent", 0, 1),
    ]  # fmt: skip
    assert [made.payload_bytes(number) for number in range(3)] == [plain.payload_bytes(), 1024, 46]
    assert made.digest() != plain.digest() and '"hybrid_manager":true' in made.layout


def test_latent_blocks_are_served_in_host_memory_and_said_to_be_latent() -> None:
    config = configuration()
    latent(config)
    assert refusal(*config) == ""
    assert [group.kind for group in fingerprint(config).groups] == ["latent"]


def test_the_path_of_a_model_is_not_in_the_digest() -> None:
    moved = configuration()
    moved[0].model_config.model = "/elsewhere"
    moved[0].model_config.hf_config.settings["_name_or_path"] = "/elsewhere"
    assert fingerprint(moved).digest() == fingerprint(configuration()).digest()


def spec_of(config: tuple[Any, Any]) -> Any:
    return config[1].kv_cache_groups[0].kv_cache_spec


def on_cuda(config: tuple[Any, Any], cache_dtype: str = "auto", *, sleeps: bool = False, **spec: Any) -> None:
    config[0].device_config.device_type = "cuda"
    config[0].model_config.enable_sleep_mode = sleeps
    config[0].cache_config.cache_dtype = cache_dtype
    vars(spec_of(config)).update(spec)


DIFFERENT: dict[str, Callable[[tuple[Any, Any]], None]] = {
    "a rope setting": lambda c: c[0].model_config.hf_config.settings.update(rope_theta=5e5),
    "the compute dtype": lambda c: setattr(c[0].model_config, "dtype", "torch.float32"),
    "the cache's dtype": lambda c: setattr(spec_of(c), "dtype", "torch.float32"),
    "the cache's setting": lambda c: setattr(c[0].cache_config, "cache_dtype", "fp8"),
    "quantised weights": lambda c: setattr(c[0].model_config, "quantization", "awq"),
    "the memory layout": lambda c: setattr(c[1], "kv_cache_layout", "BLHNC"),
    "heads": lambda c: setattr(spec_of(c), "num_kv_heads", 6),
    "the block size": lambda c: setattr(spec_of(c), "block_size", 64),
    "layers": lambda c: c[1].kv_cache_groups[0].layer_names.pop(),
    "shards": lambda c: setattr(c[0].parallel_config, "tensor_parallel_size", 2),
    "the device": lambda c: on_cuda(c),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_everything_that_bytes_depend_on_is_in_the_digest(what: str) -> None:
    changed = configuration()
    DIFFERENT[what](changed)
    assert fingerprint(changed).digest() != fingerprint(configuration()).digest()


@pytest.mark.parametrize("changed", [{"weights": "v"}, {"packing": "CPU_ATTN amx"}, {"version": "0.33.0"}])
def test_so_are_weights_packing_and_version(changed: dict[str, str]) -> None:
    assert fingerprint(configuration(), **changed).digest() != fingerprint(configuration()).digest()


def test_ranks_have_shards_of_their_own() -> None:
    config = configuration()
    config[0].parallel_config.tensor_parallel_size = 2
    assert fingerprint(config, rank=0).digest() != fingerprint(config, rank=1).digest()


def test_this_configuration_can_be_served() -> None:
    assert refusal(*configuration()) == ""


REFUSED: dict[str, Callable[[tuple[Any, Any]], None]] = {
    "xpu memory": lambda c: setattr(c[0].device_config, "device_type", "xpu"),
    "in a nvfp4 KV cache": lambda c: on_cuda(c, cache_dtype="nvfp4"),
    "an order of their own": lambda c: on_cuda(c, num_head_slots=6),
    "unset --enable-sleep-mode": lambda c: on_cuda(c, sleeps=True),
    "ChunkedLocalAttentionSpec, which this connector cannot divide: set --disable-hybrid": lambda c: another(
        c, "ChunkedLocalAttentionSpec"
    ),
    "depends on another input than the tokens": lambda c: another(c, "CrossAttentionSpec"),
    "several kinds of state (full and sliding), which this connector copies in host memory only: set --disable-hybrid"
    "-kv-cache-manager": lambda c: (on_cuda(c), another(c, "SlidingWindowSpec")),
    "keep MLAAttentionSpec caches, which this connector copies in host": lambda c: (on_cuda(c), latent(c)),
    "guesses tokens": lambda c: (
        another(c, "SlidingWindowSpec"),
        setattr(c[0], "speculative_config", SimpleNamespace()),
    ),
    "set --enable-prefix-caching": lambda c: another(c, "MambaSpec", mamba_cache_mode="none"),
    "blocks of 1920 tokens": lambda c: another(c, "SlidingWindowSpec", block_size=960),
    "pipeline parallelism": lambda c: setattr(c[0].parallel_config, "pipeline_parallel_size", 2),
    "context parallelism": lambda c: setattr(c[0].parallel_config, "decode_context_parallel_size", 2),
    "calculate_kv_scales": lambda c: setattr(c[0].cache_config, "calculate_kv_scales", True),
    "smaller --block-size": lambda c: setattr(spec_of(c), "block_size", 1024),
}


def another(config: tuple[Any, Any], name: str, **fields: Any) -> None:
    """A second group, whose specification is of this class of vLLM's."""
    spec = group_spec(name, **({"block_size": 128, "sliding_window": 256, "dtype": "torch.bfloat16"} | fields))
    config[1].kv_cache_groups.append(SimpleNamespace(kv_cache_spec=spec, layer_names=["layer.30"]))


def latent(config: tuple[Any, Any]) -> None:
    config[1].kv_cache_groups[0].kv_cache_spec = group_spec("MLAAttentionSpec", **vars(spec_of(config)))


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_served_is_refused_with_a_reason(words: str) -> None:
    changed = copy.deepcopy(configuration())
    REFUSED[words](changed)
    assert words in refusal(*changed)


def test_plain_caches_on_a_device_are_served_whose_kernels_are_known() -> None:
    config = configuration()
    on_cuda(config, num_head_slots=None)
    assert refusal(*config) == ""
    assert refused_backends({"FLASH_ATTN", "FLASHINFER"}) == ""
    assert "blocks of TURBOQUANT is not known" in refused_backends({"TURBOQUANT", "FLASH_ATTN"})


def test_weights_are_identified_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_connectors.vllm.model.process_began", lambda: time.time() + 60)
    config = configuration()[0]
    config.model_config.model = str(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    memory = tmp_path / "memory.json"
    found = find_weights(config, "", memory)
    assert found == weights_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert find_weights(config, "", memory) not in ("", found)
    assert find_weights(config, "mine v2") == "stated mine v2"


@pytest.mark.parametrize("change", ["none", "in place", "renamed over", "folder's link", "downloaded"])
def test_weights_that_changed_after_the_engine_began_are_not_those_that_it_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """vLLM copies weights when it loads them, and does not say of which file: its age alone proves that."""
    folder, current = tmp_path / "blobs" if change == "downloaded" else tmp_path / "v1", tmp_path / "current"
    folder.mkdir()
    named = folder / ("ab" * 32)
    file = folder / "model.safetensors"
    if change == "downloaded":
        file.symlink_to(named)
    file.write_bytes(b"weights")
    current.symlink_to(folder)
    began = current.lstat().st_ctime + 0.01
    time.sleep(0.05)
    if change == "in place":
        file.write_bytes(b"Weights")
    elif change == "renamed over":
        os.replace(shutil.copy2(file, tmp_path / "other"), file)
    elif change == "folder's link":
        current.unlink()
        current.symlink_to(folder)
    elif change == "downloaded":
        named.write_bytes(b"named by content, by whom it came from")
    monkeypatch.setattr("kvstore_connectors.vllm.model.process_began", lambda: began)
    config = configuration()[0]
    config.model_config.model = str(current)
    if change in ("none", "downloaded"):
        assert find_weights(config, "", tmp_path / "memory.json")
    else:
        with pytest.raises(ValueError, match=r"younger than this process.*start the engine again, or .*weights_digest"):
            find_weights(config, "", tmp_path / "memory.json")


def test_weights_that_are_no_files_must_be_stated(tmp_path: Path) -> None:
    config = configuration()[0]
    config.load_config.load_format = "dummy"
    with pytest.raises(ValueError, match=r"load_format='dummy' cannot be read as files; .*weights_digest"):
        find_weights(config, "")
    config.load_config.load_format = "auto"
    config.model_config.model = str(tmp_path)
    with pytest.raises(ValueError, match=r"no weight files were found at .*weights_digest"):
        find_weights(config, "", tmp_path / "memory.json")


def described(**fields: Any) -> Extras | str:
    return describe_extras(request("r", [1, 2, 3], **fields), hashed_items=True)


def test_what_a_request_depends_on() -> None:
    assert described() == Extras()
    assert described(cache_salt="s", mm_features=[image("cat", 1, 2)]) == Extras(
        salt="s", items=(MediaItem("cat", 1, 2),)
    )


def test_what_cannot_be_named_says_why() -> None:
    assert "embeddings" in str(described(prompt_embeds=object()))
    assert "embeddings" in str(described(prompt_token_ids=None))
    assert "changed by its sender" in str(described(resumable=True))
    assert "not hashed" in str(
        describe_extras(request("r", [1], mm_features=[image("r-image-0", 0, 1)]), hashed_items=False)
    )


def test_an_adapter_is_identified_by_content_and_not_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digests = set()
    for number, (name, content) in enumerate((("one", b"first"), ("two", b"first"), ("three", b"other"))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(content)
        (folder / "adapter_config.json").write_text("{}")
        asked = SimpleNamespace(lora_name="same", lora_int_id=number, lora_path=str(folder))
        extras = described(lora_request=asked)
        assert isinstance(extras, Extras) and extras.adapter
        digests.add(extras.adapter)
        (folder / "adapter_model.safetensors").write_bytes(b"written over, while vLLM keeps what it loaded")
        assert described(lora_request=asked) == extras
        asked.load_inplace = True
        assert "replaced while it is loaded" in str(described(lora_request=asked))
    assert len(digests) == 2
    lost = described(lora_request=SimpleNamespace(lora_name="same", lora_int_id=9, lora_path=str(tmp_path / "nowhere")))
    assert "adapter's files cannot be read" in str(lost)
