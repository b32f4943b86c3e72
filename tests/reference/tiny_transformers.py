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
