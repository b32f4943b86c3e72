"""Models share blocks by the fingerprint of what is in memory, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reference.tiny_transformers import on_device, prompt, tiny_model

# isort: split
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache, PreTrainedModel

from kvstore_client import connect
from kvstore_connectors.transformers import KVStoreCache, kvstore_session, model_fingerprint
from kvstore_connectors.transformers.fingerprint import DEVICE_LAYOUT
from kvstore_connectors.transformers.host_copies import HostTensorCopies
from kvstore_connectors.transformers.state import BLOCK_TOKENS
from kvstore_proto.errors import KVStoreError


class Adapted(torch.nn.Module):
    """A linear layer with one low-rank adapter, by PEFT's names."""

    def __init__(self, base: torch.nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.Parameter(torch.ones(rank, base.in_features))
        self.scaling = {"mine": 1.0}
        self.active_adapters = ["mine"]
        self.disable_adapters = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base_layer(hidden)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model()


def _digest(model: Any, **options: Any) -> bytes:
    return model_fingerprint(model, **options).digest()


def test_equal_models_share_blocks(model: PreTrainedModel) -> None:
    assert _digest(model) == _digest(tiny_model())
    assert _digest(model) == _digest(tiny_model(attn_implementation="eager"))


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"dtype": torch.bfloat16},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rms_norm_eps": 1e-3},
        {"kind": "qwen3"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_difference_in_anything_that_matters_is_another_model(model: PreTrainedModel, other: dict[str, Any]) -> None:
    assert _digest(model) != _digest(tiny_model(**other))
    # An id stands for the weights alone, not for what surrounds them.
    if "seed" not in other:
        assert _digest(model, model_id="mine") != _digest(tiny_model(**other), model_id="mine")


def test_an_id_stands_for_the_weights(model: PreTrainedModel) -> None:
    assert _digest(model, model_id="mine") == _digest(tiny_model(seed=1), model_id="mine")
    assert _digest(model, model_id="mine") != _digest(model, model_id="yours")


def test_the_size_of_a_block_is_that_of_its_tensors(model: PreTrainedModel) -> None:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt(BLOCK_TOKENS), past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert model_fingerprint(model).payload_bytes() == held
    assert model_fingerprint(model, block_tokens=64).payload_bytes() == 64 // BLOCK_TOKENS * held


def test_a_parameter_in_anothers_place_is_another_model(model: PreTrainedModel) -> None:
    before, kept = _digest(model), model.lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(kept.detach() + 1)  # the old one lives on, unchanged
    assert _digest(model) != before
    model.lm_head.weight = kept
    assert _digest(model) == before


def test_an_edited_weight_is_another_model(model: PreTrainedModel) -> None:
    before = _digest(model)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert _digest(model) != before


def test_an_adapter_and_how_it_is_used_is_another_model(model: PreTrainedModel) -> None:
    seen = [_digest(model)]
    attention = model.model.layers[0].self_attn
    adapted = attention.q_proj = Adapted(attention.q_proj)
    model.peft_config = {"mine": "rank 2"}
    seen.append(_digest(model))
    adapted.scaling["mine"] = 2.0
    seen.append(_digest(model))
    adapted.disable_adapters = True
    seen.append(_digest(model))
    assert len(set(seen)) == len(seen)
    assert len({_digest(model, model_id="mine"), *seen}) == len(seen) + 1


def test_a_session_of_another_model_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    other = kvstore_session(tiny_model(seed=1), tmp_path)
    with other, pytest.raises(KVStoreError, match=r"another model .* weights or configuration differ"):
        KVStoreCache(other, model)
    with kvstore_session(model, tmp_path) as session:
        KVStoreCache(session, model)
        model.to(torch.bfloat16)
        with pytest.raises(KVStoreError, match="dtype"):
            KVStoreCache(session, model)
    with kvstore_session(model, tmp_path, model_id="org:mine") as session:
        KVStoreCache(session, model)


def test_copies_of_another_layout_than_the_sessions_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    class OtherCopies(HostTensorCopies):
        layout = DEVICE_LAYOUT

    with kvstore_session(model, tmp_path) as session:
        KVStoreCache(session, model, copies=HostTensorCopies())
        with pytest.raises(KVStoreError, match="laid out as layer-major/token/k-then-v/head"):
            KVStoreCache(session, model, copies=OtherCopies())


def test_a_model_that_changes_under_its_cache_is_computed_and_not_stored(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    with kvstore_session(model, tmp_path) as session:
        cache = KVStoreCache(session, model)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(2)
        model.generate(prompt(40), past_key_values=cache, max_new_tokens=2, do_sample=False)
        assert "has changed" in cache.report.store_reason


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic rope, keys depend on the length",
        ),
        ({"dtype": torch.float64}, "computes in torch.float64"),
    ],
)
def test_what_cannot_be_stored_is_refused_in_one_sentence(settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    model = tiny_model(**settings)
    with pytest.raises(KVStoreError, match=why):
        kvstore_session(model, tmp_path)


def test_cross_attention_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("t5", d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64)
    with pytest.raises(KVStoreError, match="cross attention"):
        kvstore_session(AutoModelForSeq2SeqLM.from_config(config), tmp_path)


def test_something_else_than_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KVStoreError, match="Transformers model is needed, got Linear"):
        kvstore_session(torch.nn.Linear(2, 2), tmp_path)


def test_a_model_inside_a_wrapper_is_found(model: PreTrainedModel) -> None:
    assert _digest(torch.nn.Sequential(model)) == _digest(model)


def test_a_model_on_a_cuda_device_shares_no_blocks_with_one_on_the_cpu(model: PreTrainedModel, tmp_path: Path) -> None:
    here, there = model_fingerprint(model), model_fingerprint(on_device(tiny_model(), 99))
    assert here.weights_digest == there.weights_digest and here.payload_bytes() == there.payload_bytes()
    assert here.layout != there.layout and here.digest() != there.digest()
    with kvstore_session(model, tmp_path) as session:
        KVStoreCache(session, model)
        with pytest.raises(KVStoreError, match="layout differ"):
            KVStoreCache(session, on_device(model, 99))


def test_a_session_for_a_model_on_a_cuda_device_needs_that_device(tmp_path: Path) -> None:
    model = on_device(tiny_model(), 99)
    with pytest.raises(KVStoreError, match="CUDA device 99"):
        kvstore_session(model, tmp_path)
    with (
        connect(tmp_path, fingerprint=model_fingerprint(model)) as session,
        pytest.raises(KVStoreError, match="opened without a device"),
    ):
        KVStoreCache(session, model)


def test_a_model_that_is_moved_is_computed_and_not_stored(model: PreTrainedModel, tmp_path: Path) -> None:
    with kvstore_session(model, tmp_path) as session, torch.no_grad():
        cache = KVStoreCache(session, model)
        on_device(model)(prompt(9)[:, :1], past_key_values=cache)
        assert "another device" in cache.report.store_reason


def test_an_attention_that_transformers_does_not_bring_is_another_model(model: PreTrainedModel) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("recent_tokens_alone", sdpa_attention_forward)
    before = _digest(model)
    for own in ("eager", "sdpa"):
        model.set_attn_implementation(own)
        assert _digest(model) == before
    model.set_attn_implementation("recent_tokens_alone")
    assert _digest(model) != before


@pytest.mark.parametrize("write", ["add_", "mul_"])
def test_weights_written_past_the_counts_of_torch_are_another_model(model: PreTrainedModel, write: str) -> None:
    before = _digest(model)
    weight = model.model.layers[1].self_attn.k_proj.weight
    counted = weight._version
    getattr(weight.data, write)(3)
    assert weight._version == counted
    assert _digest(model) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_samples_of_an_unchanged_model_are_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(dtype=dtype)
    before = _digest(model)
    monkeypatch.setattr("xxhash.xxh3_128", None)  # nothing is hashed again
    assert _digest(model) == before


@pytest.mark.parametrize("change", ["weights", "adapters"])
def test_a_model_that_changes_while_it_decodes_stores_no_more(change: str, tmp_path: Path) -> None:
    model, ids = tiny_model(), prompt(60)
    layer = model.model.layers[1].self_attn
    layer.k_proj = Adapted(layer.k_proj)
    model.peft_config = {"mine": "rank 2"}
    with kvstore_session(model, tmp_path) as session, torch.no_grad():
        cache = KVStoreCache(session, model)
        model(ids[:, :58], past_key_values=cache, logits_to_keep=1)
        model(ids[:, 58:59], past_key_values=cache)
        assert cache.report.store_reason == ""
        if change == "weights":
            model.model.norm.weight.mul_(2)
        else:
            layer.k_proj.disable_adapters = True
        model(ids[:, 59:], past_key_values=cache)
        assert "the model has changed since the session was opened" in cache.report.store_reason


def test_positions_that_an_earlier_image_shifted_are_not_stored(tmp_path: Path) -> None:
    model = tiny_model()
    with kvstore_session(model, tmp_path) as session, torch.no_grad():
        model.model.rope_deltas = torch.zeros(1, 1)
        cache = KVStoreCache(session, model)
        model(prompt(20), past_key_values=cache)
        assert cache.report.store_reason == ""
        model.model.rope_deltas = torch.full((1, 1), -7)  # as Qwen2-VL keeps them, for whatever call comes next
        model(prompt(30)[:, 20:], past_key_values=cache)
        assert "shifted by an image" in cache.report.store_reason
