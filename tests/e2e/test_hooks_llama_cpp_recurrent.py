"""The cache for llama-cpp-python with recurrent layers, alone (Mamba) and beside attention (Jamba), on the real
llama.cpp and the real daemon.

Needs llama-cpp-python, in an environment of its own (docs/llama-cpp.md); skipped by name elsewhere.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_client.testing import DaemonProcess

if importlib.util.find_spec("llama_cpp") is None:
    pytest.skip("llama-cpp-python is not installed", allow_module_level=True)

import llama_cpp
from llama_cpp import Llama

from kvstore_connectors.llama_cpp import KVStoreLlamaCache
from tests.reference.recurrent_gguf import write_recurrent

pytestmark = pytest.mark.slow
BLOCK, BLOCKS = 64, 5
PROMPT = [3 + (7 * position) % 200 for position in range(BLOCKS * BLOCK + 10)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as running:
        yield running


@pytest.fixture(scope="module", params=["mamba", "jamba"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recurrent(tmp_path_factory.mktemp("model") / "tiny.gguf", request.param)


def opened(model: Path, **settings: Any) -> Llama:
    plain = {"n_ctx": 512, "verbose": False, "n_threads": 1, "n_threads_batch": 1}
    return Llama(str(model), **(plain | settings))


def cached(llm: Llama, daemon: DaemonProcess) -> KVStoreLlamaCache:
    cache = KVStoreLlamaCache(llm, daemon.socket_dir, deadline_s=5.0, always_load=True)
    llm.set_cache(cache)
    return cache


def answer(llm: Llama, prompt: list[int], tokens: int = 8) -> str:
    return str(llm.create_completion(prompt, max_tokens=tokens, temperature=0.0)["choices"][0]["text"])


def logits(llm: Llama) -> npt.NDArray[np.float32]:
    pointer = llama_cpp.llama_get_logits_ith(llm._ctx.ctx, -1)
    return np.ctypeslib.as_array(pointer, shape=(int(llm.n_vocab()),)).copy()


def turned(shift: int) -> list[int]:
    return [3 + (token + shift) % 200 for token in PROMPT]


def test_what_follows_a_restored_state_is_bit_for_bit_that_of_the_same_split(
    daemon: DaemonProcess, model: Path
) -> None:
    prompt = turned(1)
    writer, reader, plain = (opened(model) for _ in range(3))
    stored, restored = cached(writer, daemon), cached(reader, daemon)
    writer.eval(prompt)
    stored[prompt] = writer.save_state()
    state = restored[prompt]
    assert restored.restored_tokens == reader.n_tokens == state.n_tokens == BLOCKS * BLOCK
    plain.eval(prompt[: BLOCKS * BLOCK])
    assert plain.save_state().llama_state == reader.save_state().llama_state
    for tokens in (prompt[BLOCKS * BLOCK :], [9], [7, 8]):
        plain.eval(tokens)
        reader.eval(tokens)
        assert np.array_equal(logits(plain), logits(reader))
    stored.close()
    restored.close()


def test_a_conversation_goes_on_in_another_process_at_its_last_boundary(daemon: DaemonProcess, model: Path) -> None:
    first = turned(20)
    llm = opened(model)
    cache = cached(llm, daemon)
    text = answer(llm, first, 70)  # over the next boundary
    held = llm.input_ids[: llm.n_tokens].tolist()
    assert held[: len(first)] == first and len(held) > 6 * BLOCK
    second = [*held, *range(10, 40)]
    expected = answer(llm, second)
    assert cache.restored_tokens == 0, "the model itself holds as much"
    fresh = opened(model)
    reading = cached(fresh, daemon)
    assert answer(fresh, second) == expected
    assert reading.restored_tokens == 6 * BLOCK and text
    shorter = [*first[: 2 * BLOCK], *range(10, 90)]  # no state was stored there
    assert answer(fresh, shorter) == answer(opened(model), shorter) and reading.restored_tokens == 0
    cache.close()
    reading.close()


def test_a_state_that_is_not_that_of_the_tokens_is_not_stored(daemon: DaemonProcess, model: Path) -> None:
    prompt = turned(40)
    llm = opened(model)
    cache = cached(llm, daemon)
    llm.eval(prompt[:BLOCK])
    llm.load_state(llm.save_state())  # what it holds from here on was not seen to be computed by this one
    llm.eval(prompt[BLOCK : BLOCK + 20])
    cache[prompt[: BLOCK + 20]] = llm.save_state()
    assert cache.session.lookup(prompt, group=2).blocks == 0
    cache.close()
