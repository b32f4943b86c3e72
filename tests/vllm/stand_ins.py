"""Small models with random weights in the shapes that keep more than one kind of state, as folders that vLLM reads.

Owns their configurations. Weights are drawn larger than a new model's, so that attention chooses and each position
counts. Needs torch and transformers (the vLLM environment).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

VOCABULARY = 512
WINDOW = 256
_PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SHAPES: dict[str, dict[str, Any]] = {
    # Sliding and full layers in turns, attention with sinks, a mixture of experts.
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "head_dim": 64,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": None,
        "initial_context_length": 4096,
    },
    # Five sliding layers to a full one, whose heads are twice as wide.
    "gemma": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "head_dim": 64,
        "global_head_dim": 128,
        "num_global_key_value_heads": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    # Latent attention.
    "deepseek": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
    },
    # Three layers of gated delta to a full one.
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
}
NAMES = tuple(_SHAPES)


def written(name: str, folder: Path) -> Path:
    """The folder with the model, made on first use."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    target = folder / name
    if target.exists():
        return target
    shape = dict(_PLAIN) | _SHAPES[name]
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.mul_(3)
    model.to(torch.bfloat16).save_pretrained(target)
    time.sleep(0.1)  # an engine that begins within three ticks of the clock takes the files for younger than itself
    return target
