"""Our own engine as the conformance suite of connectors wants it: token ids in, greedy token ids out."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_client.testing import EngineSetting, PromptResult
from kvstore_engine import loaded_model
from kvstore_engine.batching.request import RequestSettings
from kvstore_engine.generation import Generation, Prompt
from kvstore_engine.loaded_model import LoadOptions, open_model
from tests.reference.assumed_costs import assume
from tests.reference.tiny_llama import write_tiny_llama

_ROPE_BASES = {"first": 1e4, "second": 5e5}
_ANSWER_TOKENS = 6


class OwnEngine:
    """`kvstore_engine` on a tiny model with random weights."""

    def __init__(self, setting: EngineSetting) -> None:
        self._open = ExitStack()
        folder = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
        loaded_model.cache_root = lambda: folder / "cache"
        model = write_tiny_llama(folder / "tiny.gguf", llama__rope__freq_base=_ROPE_BASES[setting.model])
        options = LoadOptions(threads=1, kvstore=setting.socket_dir, warm_up=False)
        self._generator = self._open.enter_context(open_model(model, options)).generator
        self._generator.tokenizer = _TakesIds(self._generator.tokenizer)  # type: ignore[assignment]

    def store(self, tokens: Sequence[int]) -> None:
        self._answer(tokens, RequestSettings(max_tokens=1, ignore_end=True))

    def restore(self, tokens: Sequence[int]) -> PromptResult:
        answer = self._answer(tokens, RequestSettings(max_tokens=_ANSWER_TOKENS, ignore_end=True, store=False))
        return PromptResult(answer.tokens_restored, list(answer.tokens))

    def close(self) -> None:
        self._open.close()

    def _answer(self, tokens: Sequence[int], settings: RequestSettings) -> Generation:
        assume(self._generator.costs)
        return self._generator.generate(Prompt(" ".join(map(str, tokens))), settings)


class _TakesIds:
    """The model's tokenizer, but for prompts: those are token ids in words."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, **_: bool) -> npt.NDArray[np.int32]:
        return np.array([int(word) for word in text.split()], np.int32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def open_own_engine(setting: EngineSetting) -> OwnEngine:
    return OwnEngine(setting)
