"""Small Transformers models with random weights, made in memory, nothing downloaded. Skips without the extra."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra `transformers`: pip install '.[transformers]'")
pytest.importorskip("transformers", reason="needs the extra `transformers`: pip install '.[transformers]'")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 256
torch.set_num_threads(1)  # so small, they only wait for each other, and longer the busier the machine is
_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "use_cache": True,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32}
_WINDOWS = {"head_dim": 16, "num_hidden_layers": 4}
_MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
GROUPED: dict[str, dict[str, Any]] = {  # models whose state is more than K and V of full attention
    "gpt_oss": _WINDOWS | {
        "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma3_text": _WINDOWS | {"sliding_window": 24, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "gemma4_text": _WINDOWS | {
        "sliding_window": 24, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "global_head_dim": 32,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY,
    },
    "deepseek_v3": _MLA,
    "qwen3_next": _WINDOWS | {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 32, "moe_intermediate_size": 32,
        "num_experts": 4, "num_experts_per_tok": 2,
    },
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "head_dim": 16},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "bamba": _MAMBA | {"num_hidden_layers": 4, "attn_layer_indices": [1, 3], "mamba_expand": 2},
}  # fmt: skip


def grouped_model(kind: str, **settings: Any) -> PreTrainedModel:
    """One of `GROUPED`."""
    return tiny_model(kind, **(GROUPED[kind] | settings))


def tiny_model(
    kind: str = "qwen2", *, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any
) -> PreTrainedModel:
    """A causal model of an architecture that transformers has, in eval mode. Equal arguments give equal weights."""
    torch.manual_seed(seed)
    known = {name: value for name, value in _SMALL.items() if kind != "gpt_neox" or name != "num_key_value_heads"}
    config = AutoConfig.for_model(kind, **{**known, **settings})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    """Token ids of a prompt: [1, tokens]. A longer one of the same seed continues a shorter one."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(1, VOCABULARY, (1, 4096), generator=generator)[:, :tokens]


def on_device(model: PreTrainedModel, index: int = 0) -> PreTrainedModel:
    """The same model, which says that it is on a CUDA device."""
    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"device": torch.device("cuda", index)})
    return model
