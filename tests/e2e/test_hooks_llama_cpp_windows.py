"""The cache for llama-cpp-python with models that have sliding windows, on the real llama.cpp and the real daemon.

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
from kvstore_connectors.llama_state import parse_state
from tests.reference.make_gguf import TinyModel, write_model

pytestmark = pytest.mark.slow
BLOCK, BLOCKS, WINDOW = 64, 7, 100  # the last two blocks
PROMPT = [3 + (7 * position) % 200 for position in range(BLOCKS * BLOCK + 10)]
SMALL, WHOLE = {"swa_full": False}, {"swa_full": True}


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five windowed layers to a full one, as in Gemma 3."""
    shape = TinyModel(
        layers=7,
        width=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        feed_forward=96,
        quantisation="f32",
        architecture="gemma3",
        metadata={"llama.attention.sliding_window": WINDOW, "tokenizer.chat_template": None},
    )
    return write_model(tmp_path_factory.mktemp("model") / "windows.gguf", shape)


def opened(model: Path, **settings: Any) -> Llama:
    plain = {"n_ctx": 640, "n_batch": BLOCK, "n_ubatch": BLOCK, "verbose": False, "n_threads": 1, "n_threads_batch": 1}
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


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("settings", [SMALL, WHOLE], ids=["ring", "whole"])
def test_what_follows_a_restored_prefix_is_that_of_the_same_split(
    daemon: DaemonProcess, model: Path, settings: dict[str, bool], flash_attn: bool
) -> None:
    prompt = turned(1 + 2 * flash_attn + settings["swa_full"])
    writer = opened(model, flash_attn=flash_attn, **settings)
    reader, plain = (opened(model, flash_attn=flash_attn, **settings) for _ in range(2))
    stored, restored = cached(writer, daemon), cached(reader, daemon)
    writer.eval(prompt)
    stored[prompt] = writer.save_state()
    state = restored[prompt]
    assert restored.restored_tokens == reader.n_tokens == state.n_tokens == BLOCKS * BLOCK
    plain.eval(prompt[: BLOCKS * BLOCK])
    ours, theirs = (parse_state(llm.save_state().llama_state) for llm in (reader, plain))
    assert ours.window is not None and theirs.window is not None
    assert all(np.array_equal(*each) for each in zip(ours.regions, theirs.regions, strict=True))
    assert sorted(ours.window.positions) == list(range(5 * BLOCK, BLOCKS * BLOCK)), "what the window needs"
    for first in (5 * BLOCK, 6 * BLOCK):
        blocks = np.zeros((2, ours.window.shape.token_bytes * BLOCK), np.uint8)
        for each, block in zip((ours.window, theirs.window), blocks, strict=True):
            each.write_block(first, BLOCK, block)
        assert blocks.any() and np.array_equal(*blocks)
    for tokens in (prompt[BLOCKS * BLOCK :], [9], [7, 8]):
        plain.eval(tokens)
        reader.eval(tokens)
        # Cells are in another order, so that sums round otherwise.
        assert np.abs(logits(plain) - logits(reader)).max() < 5e-3 * logits(plain).std()
    stored.close()
    restored.close()


@pytest.mark.parametrize("settings", [SMALL, WHOLE], ids=["ring", "whole"])
def test_completions_with_and_without_the_cache_are_the_same(
    daemon: DaemonProcess, model: Path, settings: dict[str, bool]
) -> None:
    prompts = [turned(20), [*turned(20), *range(10, 90)], [*turned(20)[:400], *range(10, 40)]]
    expected = [answer(opened(model, **settings), prompt) for prompt in prompts]
    for _ in range(2):
        llm = opened(model, **settings)
        cache = cached(llm, daemon)
        assert [answer(llm, prompt) for prompt in prompts] == expected
        cache.close()


def test_a_ring_stores_the_windows_that_it_has_and_a_shared_prefix_resumes_where_they_are(
    daemon: DaemonProcess, model: Path
) -> None:
    prompt = turned(40)
    llm = opened(model, **SMALL)
    cache = cached(llm, daemon)
    answer(llm, prompt)
    window = cache.session.lookup(prompt, group=1).tiers
    assert "absent" in window and set(window[-3:]) == {"host"}, window
    assert set(cache.session.lookup(prompt, group=0).tiers) == {"host"}
    other = [*prompt[: 6 * BLOCK + 5], *range(10, 90)]
    expected = answer(opened(model, **SMALL), other)
    fresh = opened(model, **SMALL)
    reading = cached(fresh, daemon)
    assert answer(fresh, other) == expected and reading.restored_tokens == 6 * BLOCK
    early = [*prompt[: 2 * BLOCK], *range(10, 90)]
    assert answer(fresh, early) == answer(opened(model, **SMALL), early) and reading.restored_tokens == 0
    cache.close()
    reading.close()


@pytest.mark.parametrize("settings", [SMALL, WHOLE], ids=["ring", "whole"])
def test_a_sequence_is_not_cut_where_its_window_is_not_there(
    daemon: DaemonProcess, model: Path, settings: dict[str, bool]
) -> None:
    """llama.cpp cuts it, answers that all is well, and computes on without the window."""
    prompt = turned(60)
    writer = opened(model, **settings)
    stored = cached(writer, daemon)
    writer.eval(prompt)
    stored[prompt] = writer.save_state()
    llm = opened(model, **settings)
    cache = cached(llm, daemon)
    answer(llm, prompt)
    assert cache.restored_tokens == BLOCKS * BLOCK
    assert llm._ctx.kv_cache_seq_rm(-1, 3 * BLOCK, -1) is False
    cache.session.close()  # nothing is restored from here on: the model goes on from what it holds, or from nothing
    for length in (6 * BLOCK, 5 * BLOCK + 5, 2 * BLOCK):
        shorter = [*prompt[:length], *range(10, 40)]
        assert answer(llm, shorter) == answer(opened(model, **settings), shorter)
    stored.close()
    cache.close()


def test_a_ring_and_a_whole_cache_share_blocks_of_nothing(daemon: DaemonProcess, model: Path, tmp_path: Path) -> None:
    digests = set()
    for settings in (SMALL, WHOLE):
        cache = KVStoreLlamaCache(opened(model, **settings), tmp_path)
        digests.add(cache.fingerprint.digest())
        assert [group.kind for group in cache.fingerprint.groups] == ["full", "sliding"]
        assert cache.fingerprint.groups[1].window_tokens == WINDOW
        cache.close()
    assert len(digests) == 2
