"""A session's opening proves of a model that K and V in blocks are all that its answers depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reference.tiny_transformers import prompt, tiny_model

# isort: split
import torch
from transformers import MllamaConfig, MllamaForCausalLM, PreTrainedModel

from kvstore_connectors.transformers import KVStoreCache, kvstore_session
from kvstore_connectors.transformers.calls import why_not
from kvstore_connectors.transformers.layers import KVStack
from kvstore_connectors.transformers.self_test import failure_of
from kvstore_connectors.transformers.state import BLOCK_TOKENS, KVShape, state_of
from kvstore_proto.errors import KVStoreError

JAMBA = {
    "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False,
}  # fmt: skip
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def mllama() -> PreTrainedModel:
    """A text model whose layers 1 and 3 attend to images, and keep nothing where there is none."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "cross_attention_layers": [1, 3],
    }  # fmt: skip
    return MllamaForCausalLM(MllamaConfig(text_config=text | IDS).text_config).eval()


def with_another_answer() -> PreTrainedModel:
    """A model whose answer depends on how many tokens came in one call: no cache of K and V has that."""
    model = tiny_model()

    def shifted(module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output + 5 * torch.sin(torch.arange(output.shape[-1]) * float(output.shape[-2]))

    model.model.embed_tokens.register_forward_hook(shifted)
    return model


def with_an_eye_on_what_comes() -> PreTrainedModel:
    """A model whose K and V change a little with later tokens, as where a prompt attends in both directions."""
    model = tiny_model()

    def mixed(module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output + 0.01 * output[:, -1:]

    model.model.embed_tokens.register_forward_hook(mixed)
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (mllama, "layer 1 keeps no K and V"),
        (lambda: tiny_model("rwkv", **IDS), "no K and V of the tokens"),
        (lambda: tiny_model("mamba", **IDS), "none of its layers keeps K and V"),
        (lambda: tiny_model("recurrent_gemma", **IDS), "layer 0 keeps its state outside of the cache"),
        (lambda: tiny_model("minimax", **IDS), "MiniMax uses cache of its own"),
        (lambda: tiny_model("jamba", **JAMBA, **IDS), "several tokens otherwise than one after the other"),
        (with_another_answer, "otherwise than from the whole prompt"),
        (with_an_eye_on_what_comes, "depend on those behind them"),
    ],
    ids=[
        "cross-attention",
        "state-elsewhere",
        "states-alone",
        "state-in-the-modules",
        "cache-of-its-own",
        "one-token-at-a-time",
        "answers",
        "both-directions",
    ],
)
def test_a_model_that_blocks_do_not_hold_is_refused_when_its_session_is_opened(
    make: Any, why: str, tmp_path: Path
) -> None:
    model = make()
    with pytest.raises(KVStoreError, match=f"cannot be stored: .*{why}"):
        kvstore_session(model, tmp_path)
    with pytest.raises(KVStoreError, match="cannot be stored"):
        KVStoreCache(tmp_path, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["qwen2", "gpt_neox", "phi", "gpt_bigcode", "falcon"])
def test_a_model_of_full_attention_passes(kind: str, dtype: torch.dtype) -> None:
    settings = {"multi_query": False} if kind == "gpt_bigcode" else {}
    if kind == "gpt_bigcode":
        settings |= {"n_embd": 64, "n_head": 4, "n_layer": 3, "num_key_value_heads": 4}
    assert failure_of(tiny_model(kind, dtype=dtype, **IDS, **settings), BLOCK_TOKENS) == ""


def test_a_model_is_tried_once_and_not_where_that_is_declined(tmp_path: Path) -> None:
    calls: list[int] = []
    model = tiny_model()
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    random = torch.get_rng_state()
    with kvstore_session(model, tmp_path) as session:
        KVStoreCache(session, model)
        tried = len(calls)
        kvstore_session(model, tmp_path).close()
    assert len(calls) == tried == 4
    assert torch.equal(torch.get_rng_state(), random)
    with kvstore_session(with_another_answer(), tmp_path, self_test=False):
        pass
    with pytest.raises(KVStoreError, match="layer 1 keeps no K and V"):  # no test is needed to see that
        kvstore_session(mllama(), tmp_path, self_test=False)


def test_a_layer_that_is_never_filled_ends_storing_at_the_first_call(tmp_path: Path) -> None:
    model = tiny_model()

    def without_a_cache(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"past_key_values": None, "cache": None}

    with kvstore_session(model, tmp_path) as session:
        cache = KVStoreCache(session, model)
        model.model.layers[1].self_attn.register_forward_pre_hook(without_a_cache, with_kwargs=True)
        with torch.no_grad():
            model(prompt(40), past_key_values=cache)
        assert "another shape, place or kind" in cache.report.store_reason
        assert cache.report.waiting_blocks == 0


def test_an_empty_argument_of_images_is_none() -> None:
    call = {"input_ids": prompt(5), "mm_encoder_outputs": {}}
    assert why_not(call, 0) == ""
    assert "mm_encoder_outputs" in why_not(call | {"mm_encoder_outputs": {"image": torch.zeros(1)}}, 0)


def test_a_model_in_training_mode_is_tried_once_it_no_longer_is(tmp_path: Path) -> None:
    model = with_another_answer().train()
    with kvstore_session(model, tmp_path) as session, torch.no_grad():
        cache = KVStoreCache(session, model)
        model.eval()
        model(prompt(40), past_key_values=cache)
        assert "otherwise than from the whole prompt" in cache.report.reason


def test_a_stack_holds_tokens_only_if_each_of_its_layers_does() -> None:
    shape = state_of(tiny_model())
    assert isinstance(shape, KVShape)
    stack = KVStack(shape)
    state = torch.zeros(1, shape.heads, 5, shape.head_dim)
    for layer in stack.layers[:-1]:
        layer.update(state, state)
    assert not stack.holds(5)
    stack.layers[-1].update(state, state)
    assert stack.holds(5) and not stack.holds(4)
