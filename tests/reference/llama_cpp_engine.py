"""Stock llama.cpp through llama-cpp-python, with our cache, as the conformance suite of connectors wants it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from llama_cpp import Llama

from kvstore_client.testing import EngineSetting, PromptResult
from kvstore_connectors.llama_cpp import KVStoreLlamaCache
from tests.reference.tiny_llama import write_tiny_llama

_ROPE_BASES = {"first": 1e4, "second": 5e5}
_ANSWER_TOKENS = 6
CONTEXT = 512


class LlamaCppEngine:
    """One `Llama` on a tiny model with random weights. Each prompt starts from an empty model, as in a new process."""

    def __init__(self, setting: EngineSetting) -> None:
        self._open = ExitStack()
        folder = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
        model = write_tiny_llama(folder / "tiny.gguf", llama__rope__freq_base=_ROPE_BASES[setting.model])
        self._llm = Llama(str(model), n_ctx=CONTEXT, n_threads=1, verbose=False)
        self._cache: KVStoreLlamaCache | None = None
        if setting.socket_dir is not None:
            # A model so small computes faster than it loads.
            self._cache = KVStoreLlamaCache(self._llm, setting.socket_dir, deadline_s=2.0, always_load=True)
            self._llm.set_cache(self._cache)

    def store(self, tokens: Sequence[int]) -> None:
        self._complete(tokens, 1)

    def restore(self, tokens: Sequence[int]) -> PromptResult:
        output = self._complete(tokens, _ANSWER_TOKENS)
        return PromptResult(self._cache.restored_tokens if self._cache else 0, output)

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
        self._llm.close()
        self._open.close()

    def _complete(self, tokens: Sequence[int], count: int) -> str:
        self._llm.reset()
        answer = self._llm.create_completion(list(tokens), max_tokens=count, temperature=0.0, logit_bias={2: -100})
        return str(answer["choices"][0]["text"])


def open_llama_cpp_engine(setting: EngineSetting) -> LlamaCppEngine:
    return LlamaCppEngine(setting)
