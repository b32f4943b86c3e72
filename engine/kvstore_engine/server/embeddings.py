"""`POST /v1/embeddings`: vectors of texts or token ids, read from the daemon where they are stored.

The module owns the fields of the request, and a thread of the HTTP process that computes what is missing with weights
that it maps at the first request; answers of the scheduler's process go on beside it. An embedding is stored under its
token ids, for the tenant alone, by a fingerprint of the weights, the pooling and what orders the sums.
Invariants: without a daemon everything is computed; after the file has changed nothing is.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from kvstore_client import Session, connect
from kvstore_client.items import ITEM_STAGING_BYTES, Item, ItemStore, item_digest, item_fingerprint, item_of
from kvstore_engine.embedding import EmbeddingModel, Pooling, Vectors, pooling_of
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.gguf import FileChanged, FileWatch, GGUFFile, OpenFile
from kvstore_engine.model.placement import order_of_sums
from kvstore_engine.server.api_errors import ApiError, failed, invalid, overloaded, unavailable
from kvstore_engine.server.body import Integer, Text, read
from kvstore_engine.server.completions import is_tokens, token_array
from kvstore_engine.server.keys import KeyOwner
from kvstore_engine.server.messages import Int32Array, pack_tokens
from kvstore_engine.server.options import EngineOptions
from kvstore_engine.threads import default_threads
from kvstore_proto.errors import KVStoreError
from kvstore_proto.version import VERSION

if TYPE_CHECKING:
    from kvstore_engine.server.service import Service

MAX_INPUTS, MAX_TOKENS = 2048, 300_000  # OpenAI's, of one request
_MAX_SESSIONS = 64
_NOT_SAID = "this model's file does not say how it pools states, so it makes no embeddings: kvengine serve --pooling"


class EmbeddingBody(BaseModel):
    """The fields of an embedding request. `input` is a text, a list of token ids, or a list of either."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    input: Any
    model: Text | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Integer, Field(ge=1)] | None = None
    user: Text | None = None


class Embeddings:
    """The embeddings of one server, of the model in `file`. `pooling` is what its options say, None for the file's own.
    One thread computes; `close` ends it.
    """

    def __init__(self, options: EngineOptions, file: OpenFile, pooling: Pooling | None) -> None:
        self._options, self._file, self._pooling = options, file, pooling
        self._thread = ThreadPoolExecutor(1, "embeddings")
        self._opened = contextlib.ExitStack()
        self._model: EmbeddingModel | None = None
        self._watch: FileWatch | None = None
        self._sessions: dict[str, Session | None] = {}
        self._waiting = 0

    async def vectors(self, inputs: Sequence[Int32Array], tenant: str, context: int) -> Vectors:
        """Return the embedding of each input, float32 [inputs, width]. `context` is the server's. Raises ApiError."""
        if self._waiting >= self._options.max_queued:
            raise overloaded(f"{self._waiting} requests for embeddings are waiting already", 1.0)
        loop = asyncio.get_running_loop()
        self._waiting += 1
        try:
            return await loop.run_in_executor(self._thread, self._vectors, inputs, tenant, context)
        except FileChanged as error:
            raise unavailable(str(error)) from None
        except (OperationError, UsageError, RuntimeError) as error:
            raise failed(f"the embeddings were not computed: {error}") from None
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._thread.submit(self._opened.close)
        self._thread.shutdown()

    # In the thread

    def _vectors(self, inputs: Sequence[Int32Array], tenant: str, context: int) -> Vectors:
        model, watch = self._open(context)
        store = self._store(tenant, model, watch, context)
        watch.check()

        def compute(missing: list[int]) -> list[Item]:
            computed = model.compute([inputs[place] for place in missing])
            watch.require_untouched()
            return [item_of(row) for row in computed]

        if store is None:
            return np.stack([item.array() for item in compute(list(range(len(inputs))))])
        items = store.through([item_digest(pack_tokens(each)) for each in inputs], compute)
        return np.stack([item.array() for item in items])

    def _open(self, context: int) -> tuple[EmbeddingModel, FileWatch]:
        if self._model is None or self._watch is None:
            file = GGUFFile.open(self._file)
            pooling = self._pooling or pooling_of(file)
            if pooling is None:
                file.close()
                raise invalid(_NOT_SAID)
            self._watch = FileWatch(file)
            threads = self._options.threads or default_threads()
            self._model = EmbeddingModel(file, pooling, threads=threads, context=context)
            self._opened.callback(self._model.close)
        return self._model, self._watch

    def _store(self, tenant: str, model: EmbeddingModel, watch: FileWatch, context: int) -> ItemStore | None:
        """Return the store of a tenant's embeddings; None without a daemon, or for a tenant too many."""
        if self._options.kvstore is None:
            return None
        if tenant not in self._sessions and len(self._sessions) < _MAX_SESSIONS:
            fingerprint = item_fingerprint(
                "embedding", model=self._file.path.stem, weights=watch.digest().weights, dtype="f32",
                library=f"kvengine {VERSION}, {order_of_sums(watch.file)}",
                settings={"pooling": model.pooling, "context": context},
            )  # fmt: skip
            session = None
            with contextlib.suppress(KVStoreError):  # refused for good: everything is computed
                session = connect(
                    self._options.kvstore, fingerprint=replace(fingerprint, account=tenant),
                    client_name="kvengine embeddings", staging_bytes=ITEM_STAGING_BYTES,
                )  # fmt: skip
                self._opened.callback(session.close)
            self._sessions[tenant] = session
        session = self._sessions.get(tenant)
        return None if session is None else ItemStore(session)


async def answer(fields: dict[str, Any], caller: KeyOwner, service: Service) -> dict[str, Any]:
    """Return the JSON of `/v1/embeddings` for the request with `fields`. Raises ApiError for wrong fields."""
    body = read(EmbeddingBody, fields)
    service.model.check_name(body.model)
    if service.embeddings is None:
        raise invalid(_NOT_SAID)
    inputs = await _inputs(body.input, service)
    if (tokens := sum(map(len, inputs))) > MAX_TOKENS:
        raise invalid(f"a request has at most {MAX_TOKENS} tokens, got {tokens}", "input")
    found = await service.embeddings.vectors(inputs, caller.tenant, service.engine.context)
    width = found.shape[1]
    if body.dimensions not in (None, width):
        raise invalid(f"this model's embeddings have {width} dimensions, and cannot be shortened", "dimensions")
    data = [
        {"object": "embedding", "index": place, "embedding": _shown(row, body.encoding_format)}
        for place, row in enumerate(found)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": service.model.name, "usage": usage}


def _shown(row: Vectors, encoding: str) -> Any:
    return row.tolist() if encoding == "float" else base64.b64encode(row.astype("<f4").tobytes()).decode()


async def _inputs(value: Any, service: Service) -> list[Int32Array]:
    many = value if isinstance(value, list) and not is_tokens(value) else [value]
    if not many:
        raise invalid("input must not be empty", "input")
    if len(many) > MAX_INPUTS:
        raise invalid(f"at most {MAX_INPUTS} inputs at once, got {len(many)}", "input")
    return await asyncio.gather(*(_input(one, service) for one in many))


async def _input(value: Any, service: Service) -> Int32Array:
    context = service.engine.context
    if value in ("", []):
        raise invalid("input must not have an empty text or list", "input")
    if isinstance(value, str):
        if (least := service.model.least_tokens(value)) > context:
            raise _too_long(f"at least {least}", context)
        tokens = await service.model.encode(value, add_special=True, parse_special=True)
    elif is_tokens(value):
        tokens = token_array(value, service, "input")
    else:
        raise invalid("input must be a string, a list of token ids, or a list of either", "input")
    if not len(tokens):
        raise invalid("input must not have a text without tokens", "input")
    if len(tokens) > context:
        raise _too_long(str(len(tokens)), context)
    return tokens


def _too_long(tokens: str, context: int) -> ApiError:
    message = f"an input has {tokens} tokens and the context holds {context}: shorten it"
    return invalid(message, "input", code="context_length_exceeded")
