"""Embeddings through the store: a wrapper of sentence-transformers' models and of clients of `/v1/embeddings`.

    embedder = CachedEmbedder(SentenceTransformer(path))
    vectors = embedder.encode(texts)

An embedding is read where one is stored for the same tokens under the same fingerprint, and computed otherwise, all
missing ones of a call in one batch. What is read is equal to the bit to what was stored. It may differ in the last bits
from what another batch would compute, as two batches differ without the store. The fingerprint covers a torch model
itself, not its name: weights, modules, dtype, device and the libraries' versions. It is made anew at each call, so that
other weights in the same object are another model. What a server computes with is known to its user alone: `weights`.

Invariants: without a daemon everything is computed; an error of the model reaches the caller as it is.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_client.entry import DEFAULT_CONNECT_TIMEOUT_S
from kvstore_client.errors import invalid
from kvstore_client.items import Item, item_digest, item_fingerprint, item_of
from kvstore_connectors.engine_session import CurrentItems
from kvstore_proto.fingerprint import Fingerprint

Vector = npt.NDArray[Any]

_OF_HOW = frozenset({"batch_size", "show_progress_bar", "convert_to_numpy", "convert_to_tensor", "chunk_size"})
"""Options of `encode` that an embedding does not depend on."""
_OF_WHAT = frozenset({"prompt", "prompt_name", "normalize_embeddings", "truncate_dim", "task"})
"""Those that it depends on. A call with any other is computed."""


class CachedEmbedder:
    """A wrapper of `model`, an object with `encode(texts, batch_size=...)` or with `embeddings.create(model=, input=)`,
    which has the same method. `socket` is the daemon's directory ($KVSTORED_SOCKET_DIR or /run/kvstored if empty).
    `weights` names the weights; for a torch model it may be left out, and then they are hashed. `ttl` is the number of
    seconds after which stored embeddings expire, None for the tenant's. Connecting, and a lookup, take at most
    `deadline_s` seconds. Everything else that is asked of this object is asked of `model`.
    """

    def __init__(
        self,
        model: Any,
        socket: str | os.PathLike[str] = "",
        *,
        weights: str = "",
        ttl: float | None = None,
        deadline_s: float = DEFAULT_CONNECT_TIMEOUT_S,
    ) -> None:
        self._is_client = hasattr(model, "embeddings") and not hasattr(model, "encode")
        if not self._is_client and not callable(getattr(model, "encode", None)):
            raise invalid(f"an object with encode() or embeddings.create() is needed, got {type(model).__name__}")
        if not weights and not hasattr(model, "named_parameters"):
            raise invalid(
                f"weights= is needed: what {type(model).__name__} computes with cannot be seen from here, so name it, "
                "and give another name when it changes"
            )
        self._model, self._weights, self._ttl = model, weights, ttl
        self._items = CurrentItems(os.fspath(socket), "embedder", deadline_s)
        if self._is_client:
            self.embeddings = SimpleNamespace(create=self._create)

    def __getattr__(self, name: str) -> Any:
        if name == "_model":
            raise AttributeError(name)
        return getattr(self._model, name)

    def close(self) -> None:
        """End the session with the daemon. A later call opens one anew."""
        self._items.close()

    def __enter__(self) -> CachedEmbedder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(self, sentences: Any, batch_size: int = 32, **options: Any) -> Any:
        """Return the embeddings of `sentences`, a text or a list of texts, as the model's own `encode` does. The model
        computes the missing ones by one call with `batch_size` and `options`. A call for anything but one vector a text
        is the model's, and nothing is stored.
        """
        texts = [sentences] if isinstance(sentences, str) else sentences
        asked = {name: value for name, value in options.items() if name not in _OF_HOW and value is not None}
        is_list = isinstance(texts, Sequence) and len(texts) and all(isinstance(text, str) for text in texts)
        store = self._items.store(self._fingerprint()) if is_list and asked.keys() <= _OF_WHAT else None
        if store is None:
            return self._model.encode(sentences, batch_size=batch_size, **options)
        settings = json.dumps(asked, sort_keys=True, default=str).encode()
        digests = [item_digest(settings, kind, key) for kind, key in self._names(texts)]
        plain = {**options, "convert_to_numpy": True, "convert_to_tensor": False}
        if not hasattr(self._model, "named_parameters"):
            plain = options

        def compute(missing: list[int]) -> list[Item]:
            computed = self._model.encode([texts[place] for place in missing], batch_size=batch_size, **plain)
            return [item_of(np.asarray(row)) for row in computed]

        vectors = [item.array() for item in store.through(digests, compute, ttl=self._ttl)]
        return self._as_asked(vectors, options, is_one=isinstance(sentences, str))

    def _as_asked(self, vectors: list[Vector], options: dict[str, Any], *, is_one: bool) -> Any:
        if options.get("convert_to_tensor") or options.get("convert_to_numpy") is False:
            import torch

            device = next(self._model.parameters()).device
            tensors = [torch.from_numpy(vector).to(device) for vector in vectors]
            if is_one:
                return tensors[0]
            return torch.stack(tensors) if options.get("convert_to_tensor") else tensors
        return vectors[0] if is_one else np.stack(vectors)

    def _names(self, texts: Sequence[str]) -> list[tuple[bytes, bytes]]:
        """Return what stands for each text: its token ids, cut where the model cuts them, or else its bytes."""
        tokenizer = getattr(self._model, "tokenizer", None)
        if not callable(tokenizer):
            return [(b"text", text.encode("utf-8", "surrogatepass")) for text in texts]
        longest = getattr(self._model, "max_seq_length", None)
        cut: dict[str, Any] = {"truncation": True, "max_length": int(longest)} if longest else {"truncation": True}
        found = tokenizer(list(texts), padding=False, **cut)["input_ids"]
        return [(b"tokens", np.asarray(ids, "<i4").tobytes()) for ids in found]

    def _create(self, *, input: Any, model: str, **options: Any) -> Any:
        """Return the embeddings of `input` as the client's own `embeddings.create` does. `usage` counts what the server
        computed for this call.
        """
        entries = [input] if isinstance(input, str) or (input and isinstance(input[0], int)) else input
        ask: Callable[..., Any] = self._model.embeddings.create
        store = self._items.store(self._fingerprint()) if entries else None
        if store is None:
            return ask(input=input, model=model, **options)
        settings = json.dumps([model, options], sort_keys=True, default=str).encode()
        texts = [isinstance(entry, str) for entry in entries]
        digests = [
            item_digest(settings, b"text", entry.encode("utf-8", "surrogatepass"))
            if is_text
            else item_digest(settings, b"tokens", np.asarray(entry, "<i4").tobytes())
            for entry, is_text in zip(entries, texts, strict=True)
        ]
        answers: list[Any] = []

        def compute(missing: list[int]) -> list[Item]:
            answers.append(ask(input=[entries[place] for place in missing], model=model, **options))
            ordered = sorted(answers[0].data, key=lambda each: each.index)
            return [_item_of_answer(each.embedding) for each in ordered]

        items = store.through(digests, compute, ttl=self._ttl)
        return _response([_shown(item) for item in items], model, answers[0] if answers else None)

    def _fingerprint(self) -> Fingerprint:
        model, package = self._model, type(self._model).__module__.split(".")[0]
        if not hasattr(model, "named_parameters"):
            release = getattr(sys.modules.get(package), "__version__", "")
            return item_fingerprint(
                "embedding", model=type(model).__name__, weights=self._weights, dtype="",
                library=f"{package} {release}", settings={"server": str(getattr(model, "base_url", ""))},
            )  # fmt: skip
        from kvstore_connectors.transformers.fingerprint import torch_identity

        weights, dtype, library, settings = torch_identity(model, self._weights)
        release = getattr(sys.modules.get(package), "__version__", "")
        return item_fingerprint(
            "embedding", model=type(model).__name__, weights=weights, dtype=dtype,
            library=f"{package} {release}, {library}",
            settings={**settings, **{name: str(getattr(model, name, "")) for name in _MODEL_SETTINGS}},
        )  # fmt: skip


_MODEL_SETTINGS = ("max_seq_length", "prompts", "default_prompt_name", "truncate_dim")


def _item_of_answer(embedding: Any) -> Item:
    """Return the embedding of an answer as an item: text in base64 stays text."""
    if isinstance(embedding, str):
        return Item("base64", (), np.frombuffer(base64.b64decode(embedding), np.uint8))
    return item_of(np.asarray(embedding, np.float64))  # what JSON carries


def _shown(item: Item) -> Any:
    return base64.b64encode(item.data.tobytes()).decode() if item.dtype == "base64" else item.array().tolist()


def _response(embeddings: list[Any], model: str, answer: Any) -> Any:
    """Return the response with `embeddings`, made by the classes of the openai package where it is loaded."""
    usage = getattr(answer, "usage", None)
    name = getattr(answer, "model", model)
    if "openai" in sys.modules:
        from openai.types import CreateEmbeddingResponse, Embedding
        from openai.types.create_embedding_response import Usage

        given = [Embedding.model_construct(embedding=each, index=place, object="embedding")
                 for place, each in enumerate(embeddings)]  # fmt: skip
        usage = usage or Usage(prompt_tokens=0, total_tokens=0)
        return CreateEmbeddingResponse.model_construct(data=given, model=name, object="list", usage=usage)
    data = [SimpleNamespace(embedding=each, index=place, object="embedding") for place, each in enumerate(embeddings)]
    usage = usage or SimpleNamespace(prompt_tokens=0, total_tokens=0)
    return SimpleNamespace(data=data, model=name, object="list", usage=usage)
