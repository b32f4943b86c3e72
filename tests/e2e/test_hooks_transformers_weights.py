"""Transformers models in objects of the store: every parameter where it lies, every tensor equal to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra transformers")
transformers = pytest.importorskip("transformers", reason="needs the extra transformers")

from kvstore_client import KVStoreError  # noqa: E402
from kvstore_client.objects.sources import BytesSource, weights_source  # noqa: E402
from kvstore_client.objects.store import ObjectStore, open_objects  # noqa: E402
from kvstore_client.objects.tables import Table, array_source  # noqa: E402
from kvstore_connectors.object_tensors import embedding  # noqa: E402
from kvstore_connectors.transformers import fingerprint, load_model, model_fingerprint, store_model  # noqa: E402
from tests.reference.running_daemon import running_daemon  # noqa: E402

SMALL = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
IDS = torch.arange(3, 90).reshape(1, -1)


def dense(dtype: Any = torch.bfloat16, **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | more)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def mixture() -> Any:
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(**SMALL, **EXPERTS)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with running_daemon() as daemon, open_objects(daemon.socket_dir, staging_bytes=1 << 20) as opened:
        yield opened


def assert_equal_and_shared(found: Any, wanted: Any, store: ObjectStore) -> None:
    ours, theirs = found.state_dict(), wanted.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ranges = [(each.address, each.address + each.nbytes) for each in store._mappings]
    for name, parameter in found.named_parameters():
        assert any(first <= parameter.data_ptr() < end for first, end in ranges), f"{name} is a copy"
        assert not parameter.requires_grad and parameter.data_ptr() % 64 == 0
    with torch.no_grad():
        assert torch.equal(found(IDS).logits, wanted(IDS).logits)


@pytest.mark.parametrize(
    "make", [dense, mixture, lambda: dense(torch.float32), lambda: dense(tie_word_embeddings=True)]
)
def test_a_model_stored_as_loaded_is_all_views(store: ObjectStore, make: Any) -> None:
    model = make()
    store_model(store, "loaded", model)
    assert_equal_and_shared(load_model("loaded", store), model, store)


def test_a_directory_is_loaded_as_from_pretrained_does(store: ObjectStore, tmp_path: Path) -> None:
    model = dense()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with weights_source(tmp_path) as source:
        store.put("directory", source)
    assert_equal_and_shared(load_model("directory", store), model, store)


def test_the_fingerprint_is_the_catalogues_and_follows_the_content(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashed(*_: object) -> None:
        raise AssertionError("weights were hashed")

    model = dense()
    digest = store_model(store, "named", model).version.digest.hex()
    with monkeypatch.context() as patched:
        patched.setattr(fingerprint, "_bytes_of", hashed)
        first = model_fingerprint(load_model("named", store))
        again = model_fingerprint(load_model("named", store))
        assert digest in first.weights_digest and first == again
        with torch.no_grad():
            model.model.norm.weight[3] += 1
        store_model(store, "named", model)
        assert model_fingerprint(load_model("named", store)).digest() != first.digest()
        assert model_fingerprint(load_model("named", store, dtype=torch.float32)).digest() != first.digest()
    copy = load_model("named", store, dtype=torch.float32)
    before = model_fingerprint(copy).weights_digest
    with torch.no_grad():
        copy.model.norm.weight[3] += 1
    assert model_fingerprint(copy).weights_digest != before


def test_an_embedding_over_a_table(store: ObjectStore) -> None:
    rows = np.random.default_rng(0).standard_normal((300, 64)).astype("f4")
    store.put("rows", array_source(rows))
    table = Table(store.map("rows"))
    wanted = torch.from_numpy(rows)[IDS]
    assert torch.equal(embedding(table)(IDS), wanted)
    store_model(store, "f32", dense(torch.float32))
    model = load_model("f32", store, tables={"model.embed_tokens.weight": table})
    assert model.model.embed_tokens.weight.data_ptr() == table.rows.ctypes.data
    assert torch.equal(model.model.embed_tokens(IDS), wanted)


def test_what_is_no_model_is_refused(store: ObjectStore) -> None:
    store.put("text", BytesSource(b"text"))
    with pytest.raises(KVStoreError, match=r"has no config.json"):
        load_model("text", store)
    with pytest.raises(KVStoreError, match="no object of this name"):
        load_model("nothing", store)
