"""A real model, its GGUF loaded by Transformers: text as without a store, K/V equal to the bit. Skipped without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra `transformers`: pip install '.[transformers]'")
pytest.importorskip("transformers", reason="needs the extra `transformers`: pip install '.[transformers]'")
pytest.importorskip("gguf", reason="needs the extra `transformers`: pip install '.[transformers]'")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from kvstore_connectors.transformers import KVStoreCache, kvstore_session
from kvstore_engine.models.cache import cache_root
from kvstore_engine.models.known import KNOWN_MODELS
from tests.reference.running_daemon import RunningDaemon, running_daemon

pytestmark = pytest.mark.slow
NAME = "smollm2-135m-instruct"
QUESTION = "Name the capital of France and one river that runs through it."
CAPACITY = ("host.capacity=256MiB", "host.staging=32MiB", "host.arena=32MiB", "nvme.capacity=512MiB", "nvme.slab=32MiB")
LIMITS = ("limits.max_block=4MiB", "limits.staging_per_client=16MiB")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    file = cache_root() / "models" / KNOWN_MODELS[NAME].file_name
    if not file.exists():
        pytest.skip(f"{NAME} is not in the model cache (kvengine fetch {NAME})")
    loaded = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=request.param)
    return loaded.eval()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    file = cache_root() / "models" / KNOWN_MODELS[NAME].file_name
    if not file.exists():
        pytest.skip(f"{NAME} is not in the model cache (kvengine fetch {NAME})")
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    text = " ".join(f"Chapter {number}: the keeper counted {number} lamps and wrote it down." for number in range(40))
    chat = [{"role": "system", "content": text}, {"role": "user", "content": QUESTION}]
    ids: torch.Tensor = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    return ids


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(*CAPACITY, *LIMITS) as running:
        yield running


def test_a_real_model_answers_the_same_from_what_is_stored(
    daemon: RunningDaemon, model: PreTrainedModel, tokens: torch.Tensor
) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    options: dict[str, Any] = {"deadline_s": 20.0, "staging_bytes": 16 << 20, "required": True}
    with kvstore_session(model, daemon.socket_dir, **options) as session:
        first = KVStoreCache(session, model, deadline_s=20.0, always_load=True)
        cold = model.generate(tokens, past_key_values=first, **asked)
        assert first.flush(60)
        assert first.report.store_reason == ""
    with kvstore_session(model, daemon.socket_dir, **options) as session, torch.no_grad():
        cache = KVStoreCache(session, model, deadline_s=20.0, always_load=True)
        logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits
        held = tokens.shape[1] // session.block_tokens * session.block_tokens
        assert cache.report.restored_tokens == held > 500
        kept = DynamicCache(config=model.config)
        model(tokens, past_key_values=kept)
        kept.crop(held - tokens.shape[1])
        assert torch.equal(logits, model(tokens[:, held:], past_key_values=kept, logits_to_keep=1).logits)
        for ours, theirs in zip(cache.layers, kept.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
        if model.dtype == torch.float32:  # in bf16 another split alone may change tokens, without any store
            plain = model.generate(tokens, **asked)
            again = KVStoreCache(session, model, deadline_s=20.0, always_load=True)
            warm = model.generate(tokens, past_key_values=again, **asked)
            assert again.report.restored_tokens == held
            assert torch.equal(cold, plain)
            assert torch.equal(warm, plain)
