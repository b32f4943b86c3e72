"""Engines with connectors that answer one prompt in three ways: load what is worth it, load all, compute all.

Each owns its engine and its sessions, and is asked from an empty cache of its own. Times are seconds.
"""

from __future__ import annotations

import importlib.util
import inspect
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from support import vllm_engine

CHOICE, COMPUTE, LOAD = "choice", "compute", "load"
MODEL = "smollm2-135m-instruct"
DEADLINE_S = 5.0  # of a question: a busy machine must not make misses
LONGEST_LOAD_MS = 300_000  # where all is to be loaded, however slowly


@dataclass(frozen=True)
class Answer:
    ttft_s: float
    token: int
    restored: int


class Engine(Protocol):
    """An engine with its connector; `block_tokens` of the connector's blocks."""

    block_tokens: int

    def connect(self, socket_dir: Path) -> None: ...
    def ask(self, way: str, prompt: list[int]) -> Answer:
        """The prompt from an empty engine; what it computed is stored after the first token, or soon after return."""

    def disconnect(self) -> None: ...


class Transformers:
    block_tokens = 8

    def __init__(self, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers_ttft import saved_model

        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(str(saved_model()), dtype=torch.float32).eval()
        names = inspect.signature(self._model.forward).parameters
        self._argument = "cache" if "cache" in names else "past_key_values"  # before Transformers 5.24

    def connect(self, socket_dir: Path) -> None:
        from kvstore_connectors.transformers import kvstore_session

        self._session = kvstore_session(self._model, socket_dir, required=True, connect_timeout_s=10.0)

    def ask(self, way: str, prompt: list[int]) -> Answer:
        import torch

        from kvstore_connectors.transformers import KVStoreCache

        ids, cache = torch.tensor([prompt]), None
        begin = time.perf_counter()
        if way in (CHOICE, LOAD):
            cache = KVStoreCache(self._session, self._model, deadline_s=DEADLINE_S, always_load=way == LOAD)
        answer = self._model.generate(ids, **{self._argument: cache}, max_new_tokens=1, do_sample=False)
        ttft_s = time.perf_counter() - begin
        if cache is None:
            return Answer(ttft_s, int(answer[0, -1]), 0)
        cache.flush()
        return Answer(ttft_s, int(answer[0, -1]), cache.report.restored_tokens)

    def disconnect(self) -> None:
        self._session.close()


class LlamaCpp:
    block_tokens = 64

    def __init__(self, threads: int) -> None:
        from llama_cpp import Llama

        from kvstore_engine.models import locate

        self._llm = Llama(str(locate(MODEL)), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
        self._caches: dict[str, Any] = {}

    def connect(self, socket_dir: Path) -> None:
        from kvstore_connectors.llama_cpp import KVStoreLlamaCache

        for way in (CHOICE, LOAD):
            self._caches[way] = KVStoreLlamaCache(
                self._llm, socket_dir, deadline_s=DEADLINE_S, always_load=way == LOAD, required=True
            )

    def ask(self, way: str, prompt: list[int]) -> Answer:
        from llama_cpp import LogitsProcessorList

        sampled: list[tuple[float, int]] = []

        def mark(_: Any, scores: Any) -> Any:
            sampled.append((time.perf_counter(), int(np.argmax(scores))))
            return scores

        cache = self._caches.get(way)
        self._llm.reset()
        self._llm.set_cache(cache)
        begin = time.perf_counter()
        self._llm.create_completion(prompt, max_tokens=1, temperature=0.0, logits_processor=LogitsProcessorList([mark]))
        ended_s, token = sampled[0]
        return Answer(ended_s - begin, token, cache.restored_tokens if cache is not None else 0)

    def disconnect(self) -> None:
        self._llm.set_cache(None)
        for cache in self._caches.values():
            cache.close()


class Vllm:
    """Three engines in processes of their own, started anew for each daemon; vLLM says of how many threads."""

    block_tokens = 128

    def __init__(self, _threads: int) -> None:
        self._model = vllm_engine.model("float32")
        self._running = ExitStack()
        self._engines: dict[str, vllm_engine.EngineProcess] = {}

    def connect(self, socket_dir: Path) -> None:
        logs = Path(self._running.enter_context(tempfile.TemporaryDirectory(prefix="kvvllm-")))
        chosen = {"socket": str(socket_dir), "lookup_deadline_ms": int(1000 * DEADLINE_S)}
        patient = {"always_load": True, "load_deadline_ms": LONGEST_LOAD_MS, "beside_deadline_ms": LONGEST_LOAD_MS}
        for way, settings in ((COMPUTE, None), (CHOICE, chosen), (LOAD, chosen | patient)):
            engine = vllm_engine.started(
                logs / f"{way}.log", self._model, settings, dtype="float32", enable_prefix_caching=False
            )
            self._engines[way] = self._running.enter_context(engine)

    def ask(self, way: str, prompt: list[int]) -> Answer:
        answer = self._engines.get(way, self._engines[COMPUTE]).ask([prompt], 1)
        return Answer(answer.wall_s, answer.tokens[0][0], answer.cached[0])

    def disconnect(self) -> None:
        self._running.close()


CONNECTORS: dict[str, Callable[[int], Engine]] = {"transformers": Transformers, "llama-cpp": LlamaCpp, "vllm": Vllm}


def installed() -> list[str]:
    """Names of the connectors whose engines are here."""
    modules = {"transformers": "transformers", "llama-cpp": "llama_cpp"}
    here = [name for name, module in modules.items() if importlib.util.find_spec(module) is not None]
    return [*here, "vllm"] if vllm_engine.PYTHON.exists() else here
