"""Cached embeddings against the real daemon: equal to the bit, computed once, never another model's."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.reference.running_daemon import RunningDaemon, running_daemon
from tests.reference.tiny_transformers import VOCABULARY

# isort: split
import torch
from transformers import BertConfig, BertModel

from kvstore_connectors.embedder import CachedEmbedder
from kvstore_proto.errors import KVStoreError


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("limits.max_clients=64") as running:
        yield running


class TinySentences(torch.nn.Module):
    """A model with the interface of sentence-transformers', which notes the texts of each call."""

    def __init__(self, seed: int = 0, pooling: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(seed)
        small = BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
        self.inner, self.pooling, self.max_seq_length = BertModel(small).eval(), pooling, 16
        self.calls: list[list[str]] = []

    def extra_repr(self) -> str:
        return self.pooling

    def tokenizer(self, texts: list[str], *, max_length: int, **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1, *(1 + ord(letter) % 250 for letter in text.lower())][:max_length] for text in texts]}

    def encode(self, texts: Any, batch_size: int = 32, **options: Any) -> Any:
        rows = [texts] if isinstance(texts, str) else texts
        self.calls.append(list(rows))
        found = []
        for ids in self.tokenizer(rows, max_length=self.max_seq_length)["input_ids"]:
            with torch.inference_mode():
                states = self.inner(torch.tensor([ids])).last_hidden_state[0]
            found.append((states.mean(0) if self.pooling == "mean" else states[0]).numpy())
        whole = np.stack(found) / (np.linalg.norm(found[0]) if options.get("normalize_embeddings") else 1)
        return whole[0] if isinstance(texts, str) else whole


@pytest.fixture
def open_embedder(daemon: RunningDaemon) -> Iterator[Callable[..., CachedEmbedder]]:
    opened: list[CachedEmbedder] = []

    def open_one(model: Any, **options: Any) -> CachedEmbedder:
        opened.append(CachedEmbedder(model, daemon.socket_dir, deadline_s=30, **options))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def test_texts_are_computed_once_and_equal_to_the_bit(open_embedder: Callable[..., CachedEmbedder]) -> None:
    model = TinySentences(seed=1)
    texts = ["a", "b", "a", "c", "A"]  # the tokenizer makes "A" the tokens of "a"
    first = open_embedder(model).encode(texts, batch_size=2)
    assert model.calls == [["a", "b", "c"]]
    plain = TinySentences(seed=1).encode(texts)
    assert first.dtype == plain.dtype and (first == plain).all()
    embedder = open_embedder(model)
    assert (embedder.encode(["d", *texts]) == TinySentences(seed=1).encode(["d", *texts])).all()
    assert model.calls[1:] == [["d"]]
    assert (embedder.encode("a") == first[0]).all() and torch.equal(
        embedder.encode(["b", "d"], convert_to_tensor=True)[0], torch.from_numpy(first[1])
    )
    assert embedder.encode(["x" * 15]).shape == embedder.encode(["x" * 99]).shape and model.calls[2:] == [["x" * 15]]
    assert len(model.calls) == 3 and embedder.max_seq_length == 16


def test_what_a_vector_depends_on_is_in_its_name(open_embedder: Callable[..., CachedEmbedder]) -> None:
    def computed(model: TinySentences, **options: Any) -> bool:
        before = len(model.calls)
        with open_embedder(model) as embedder:
            found = embedder.encode(["same"], **options)
        assert (found == copy.deepcopy(model).encode(["same"], **options)).all()
        return len(model.calls) > before

    model = TinySentences(seed=2)
    assert computed(model) and not computed(model) and not computed(TinySentences(seed=2), show_progress_bar=True)
    assert computed(model, normalize_embeddings=True)
    assert computed(TinySentences(seed=3)) and computed(TinySentences(seed=2, pooling="cls"))
    assert computed(copy.deepcopy(model).to(torch.float64))
    with torch.no_grad():
        model.inner.embeddings.word_embeddings.weight[5] += 1  # in place, with a session open
    assert computed(model)
    model.max_seq_length = 3
    assert computed(model) and not computed(model)


def test_other_weights_in_one_object_are_noticed(open_embedder: Callable[..., CachedEmbedder]) -> None:
    model = TinySentences(seed=4)
    embedder = open_embedder(model)
    old = embedder.encode(["text"])
    model.load_state_dict(TinySentences(seed=5).state_dict())
    assert (embedder.encode(["text"]) == TinySentences(seed=5).encode(["text"])).all()
    model.load_state_dict(TinySentences(seed=4).state_dict())
    assert (embedder.encode(["text"]) == old).all() and len(model.calls) == 2


def test_calls_for_anything_else_are_the_models_own(open_embedder: Callable[..., CachedEmbedder]) -> None:
    model = TinySentences(seed=6)
    embedder = open_embedder(model)
    for _ in range(2):
        embedder.encode(["a"], output_value="token_embeddings")
    assert len(model.calls) == 2
    with pytest.raises(ValueError):
        embedder.encode([])  # as NumPy says of an empty stack


def test_without_a_daemon_everything_is_computed(tmp_path: Path) -> None:
    model = TinySentences(seed=7)
    with CachedEmbedder(model, tmp_path) as embedder:
        found = [embedder.encode(["a", "a"]) for _ in range(2)]
    assert (found[0] == found[1]).all() and model.calls == [["a"], ["a"]]


class Server:
    """A client of `/v1/embeddings` whose server counts the inputs that it computes."""

    base_url = "http://server/v1"

    def __init__(self) -> None:
        self.embeddings, self.asked = SimpleNamespace(create=self.create), list[Any]()

    def create(self, *, input: Any, model: str, encoding_format: str = "float", **_: Any) -> Any:
        entries = [input] if isinstance(input, str) else input
        self.asked.append(entries)
        data = []
        for place, entry in enumerate(entries):
            vector = np.random.default_rng(len(entry) + len(model)).standard_normal(8).astype(np.float32)
            shown = base64.b64encode(vector.tobytes()).decode() if encoding_format == "base64" else vector.tolist()
            data.append(SimpleNamespace(embedding=shown, index=place, object="embedding"))
        usage = SimpleNamespace(prompt_tokens=len(entries), total_tokens=len(entries))
        return SimpleNamespace(data=data[::-1], model=model, object="list", usage=usage)


def test_a_client_of_a_server_gets_the_servers_numbers(open_embedder: Callable[..., CachedEmbedder]) -> None:
    server = Server()
    embedder = open_embedder(server, weights="v1")
    for options in ({}, {"encoding_format": "base64"}, {"dimensions": 4}):
        for entries in (["one", "three", "one"], "three", [[1, 2], [3]]):
            plain = Server().create(input=entries, model="m", **options)
            expected = [each.embedding for each in sorted(plain.data, key=lambda each: each.index)]
            for _ in range(2):
                found = embedder.embeddings.create(input=entries, model="m", **options)
                assert [each.embedding for each in found.data] == expected
                assert [each.index for each in found.data] == list(range(len(expected)))
            assert found.usage.total_tokens == 0 and found.model == "m"
    assert server.asked == [["one", "three"], [[1, 2], [3]]] * 3
    embedder.embeddings.create(input="one", model="other")
    open_embedder(server, weights="v2").embeddings.create(input="one", model="m")
    assert server.asked[6:] == [["one"], ["one"]]


def test_wrong_calls_say_what_to_do() -> None:
    with pytest.raises(KVStoreError, match="weights= is needed"):
        CachedEmbedder(Server())
    with pytest.raises(KVStoreError, match=r"encode\(\) or embeddings"):
        CachedEmbedder(object(), weights="w")


def test_a_model_of_sentence_transformers(tmp_path: Path, open_embedder: Callable[..., CachedEmbedder]) -> None:
    library = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh"])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(tmp_path)
    TinySentences(seed=8).inner.save_pretrained(tmp_path)
    model = library.SentenceTransformer(str(tmp_path), device="cpu")
    texts = ["a b c", "d", "a b c", "e f g h a b c d"]
    expected = model.encode(texts[:2], normalize_embeddings=True)
    embedder = open_embedder(model)
    assert (embedder.encode(texts[:2], normalize_embeddings=True) == expected).all()
    model.forward = None  # nothing is computed from here on
    assert (embedder.encode(texts[:3], normalize_embeddings=True) == expected[[0, 1, 0]]).all()
    with pytest.raises(TypeError):
        embedder.encode(texts, normalize_embeddings=True)
