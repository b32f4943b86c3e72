"""Blocks of a `Llama` are stored and shared by what it was seen to compute, from a known file, in a known form.

Needs llama-cpp-python, in an environment of its own (docs/llama-cpp.md); skipped by name elsewhere.
"""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_client.testing import DaemonProcess

if importlib.util.find_spec("llama_cpp") is None:
    pytest.skip("llama-cpp-python is not installed", allow_module_level=True)

import llama_cpp
from llama_cpp import Llama

from kvstore_connectors import llama_probe
from kvstore_connectors.llama_cpp import KVStoreLlamaCache
from tests.reference.tiny_llama import write_tiny_llama

BLOCK = 64
PROMPT = [3 + (7 * position) % 200 for position in range(5 * BLOCK + 10)]
OTHER = [5 + (11 * position) % 200 for position in range(5 * BLOCK + 10)]
QUANTISED = {"flash_attn": True, "type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0}


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as running:
        yield running


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny.gguf")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 64, which llama.cpp turns where it quantises them."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "wide.gguf", head_dim=64)


def opened(model: Path, **settings: Any) -> Llama:
    return Llama(str(model), **({"n_ctx": 512, "n_threads": 1, "verbose": False} | settings))


def cached(llm: Llama, daemon: DaemonProcess | Path, **options: Any) -> KVStoreLlamaCache:
    socket = daemon if isinstance(daemon, Path) else daemon.socket_dir
    return KVStoreLlamaCache(llm, socket, **({"deadline_s": 5.0, "always_load": True} | options))


def answer(llm: Llama, prompt: list[int]) -> str:
    return str(llm.create_completion(prompt, max_tokens=8, temperature=0.0)["choices"][0]["text"])


# In a known form


def test_a_cache_that_llama_cpp_turns_shares_nothing_with_one_that_it_does_not(
    daemon: DaemonProcess, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache multiplies quantised K and V by a Hadamard matrix, and its saved state does not say so."""
    fingerprints = []
    for disabled in ("1", "0"):
        monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", disabled)
        expected = answer(opened(wide, **QUANTISED), PROMPT)
        llm = opened(wide, **QUANTISED)
        cache = cached(llm, daemon)
        llm.set_cache(cache)
        assert answer(llm, PROMPT) == expected
        assert cache.restored_tokens == 0
        fingerprints.append(cache.fingerprint)
        cache.close()
        again = opened(wide, **QUANTISED)
        cache = cached(again, daemon)
        again.set_cache(cache)
        assert answer(again, PROMPT) == expected
        assert cache.restored_tokens == 5 * BLOCK
        cache.close()
    assert fingerprints[0].digest() != fingerprints[1].digest()


@pytest.mark.parametrize("settings", [{}, QUANTISED], ids=["f16", "q8_0"])
def test_threads_and_the_size_of_a_batch_are_no_difference(
    wide: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    digests = set()
    for other in ({}, {"n_threads": 2, "n_threads_batch": 3}, {"n_batch": 8}, {"n_batch": 64, "n_ubatch": 32}):
        cache = cached(opened(wide, **settings, **other), tmp_path)
        digests.add(cache.fingerprint.digest())
        cache.close()
    assert len(digests) == 1


def test_a_model_that_answers_otherwise_from_a_restored_block_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = llama_probe.assemble_state

    def damaged(*arguments: Any) -> np.ndarray:
        state = honest(*arguments)
        state[-4000:] = state[-4000:][::-1].copy()
        return state

    monkeypatch.setattr(llama_probe, "assemble_state", damaged)
    with pytest.raises(ValueError, match="otherwise than from the whole prompt"):
        cached(opened(model), tmp_path)
    cached(opened(model), tmp_path, self_test=False).close()


# Of tokens that were evaluated


def image(llm: Llama, positions: int) -> None:
    """Decode embeddings as handlers of llama-cpp-python do: the position moves on, and no ids are written."""
    width = llm.n_embd()
    batch = llama_cpp.llama_batch_init(positions, width, 1)
    values = np.random.default_rng(1).standard_normal(positions * width).astype(np.float32)
    ctypes.memmove(batch.embd, values.ctypes.data, values.nbytes)
    batch.n_tokens = positions
    for index in range(positions):
        batch.pos[index] = llm.n_tokens + index
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = 0
        batch.logits[index] = index == positions - 1
    assert llama_cpp.llama_decode(llm._ctx.ctx, batch) == 0
    llama_cpp.llama_batch_free(batch)
    llm.n_tokens += positions


def image_after_text(llm: Llama) -> None:
    llm.reset()
    llm._ctx.kv_cache_clear()
    llm.eval(PROMPT[:70])
    image(llm, 100)
    llm.eval(PROMPT[170:])


def image_first(llm: Llama) -> None:
    llm.reset()
    llm._ctx.kv_cache_clear()
    image(llm, 100)
    llm.eval(PROMPT[100:])


def another_state(llm: Llama) -> None:
    other = opened(Path(llm.model_path))
    other.eval(PROMPT[:40])
    image(other, 200)
    other.input_ids[40:240] = PROMPT[40:240]
    llm.load_state(other.save_state())


def decoded_by_hand(llm: Llama) -> None:
    llm._batch.set_batch(batch=OTHER[: 2 * BLOCK], n_past=0, logits_all=False)
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm._ctx.ctx), True)
    llm._ctx.decode(llm._batch)
    llm.n_tokens = 2 * BLOCK


def shifted(llm: Llama) -> None:
    llm._ctx.kv_cache_seq_rm(0, 10, 20)
    llm._ctx.kv_cache_seq_shift(0, 20, -1, -10)
    llm.n_tokens -= 10


def cleared_by_hand(llm: Llama) -> None:
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm._ctx.ctx), True)


@pytest.mark.parametrize(
    ("meddle", "kept"),
    [
        (image_after_text, 1),
        (image_first, 0),
        (another_state, 0),
        (decoded_by_hand, 0),
        (shifted, 0),
        (cleared_by_hand, 0),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_blocks_end_where_the_model_moved_on_by_other_means(
    model: Path, meddle: Callable[[Llama], None], kept: int
) -> None:
    with DaemonProcess() as daemon:
        llm = opened(model)
        cache = cached(llm, daemon)
        llm.eval(PROMPT)  # the ids of an earlier text are there
        meddle(llm)
        cache[PROMPT] = llm.save_state()
        assert cache.session.lookup(np.array(PROMPT, np.int32)).blocks == kept
        assert kept or "seen to evaluate" in cache.last_receipt
        reader = opened(model)
        reading = cached(reader, daemon)
        reader.set_cache(reading)
        assert answer(reader, PROMPT) == answer(opened(model), PROMPT)
        assert reading.restored_tokens == kept * BLOCK
        cache.close()
        reading.close()


def test_what_was_evaluated_restored_and_evaluated_again_is_stored(daemon: DaemonProcess, model: Path) -> None:
    llm = opened(model)
    cache = cached(llm, daemon)
    llm.set_cache(cache)
    first = [*OTHER[:200]]
    answer(llm, first)  # stored
    again = opened(model)
    other = cached(again, daemon)
    again.set_cache(other)
    longer = [*first, *PROMPT[:200]]
    answer(again, longer)
    assert other.restored_tokens == 3 * BLOCK
    assert other.session.lookup(np.array(longer, np.int32)).blocks == 6
    state = again.save_state()
    again.reset()
    again.load_state(state)
    other[longer] = again.save_state()
    assert "not stored" not in other.last_receipt and "no full" not in other.last_receipt
    cache.close()
    other.close()


def test_drafts_that_were_taken_back_are_not_stored(daemon: DaemonProcess, model: Path) -> None:
    def wrong(ids: np.ndarray, /, **_: Any) -> np.ndarray:
        return (ids[-4:] + 1) % 200

    llm = Llama(str(model), n_ctx=512, n_threads=1, verbose=False, logits_all=False)
    cache = cached(llm, daemon)
    llm.eval(PROMPT[:100])
    llm.eval(wrong(np.array(PROMPT[:100])).tolist())
    llm.n_tokens = 100
    llm.eval(PROMPT[100:200])
    cache[PROMPT[:200]] = llm.save_state()
    assert cache.session.lookup(np.array(PROMPT[:200], np.int32)).blocks == 3
    cache.close()


def test_a_watched_model_is_still_what_it_was(model: Path, tmp_path: Path) -> None:
    llm = opened(model)
    cached(llm, tmp_path).close()
    cached(llm, tmp_path).close()
    assert isinstance(llm, Llama) and type(llm).__name__ == "Llama" and len(type(llm).__mro__) == 3
    assert type(copy.copy(llm)) is Llama
    assert type(pickle.loads(pickle.dumps(llm))) is Llama


# From a known file


def replaced(how: str, link: Path, other: Path) -> None:
    """Have `link`, to a model's file, lead to `other`: by turning the link, or by renaming over the file."""
    if how == "link":
        link.unlink()
        link.symlink_to(other)
    else:
        os.replace(other, link.resolve())


@pytest.mark.parametrize("how", ["renamed over", "in place", "touched", "link"])
def test_a_file_that_changes_under_the_model_is_stored_under_its_old_name_or_not_at_all(
    daemon: DaemonProcess, model: Path, tmp_path: Path, how: str
) -> None:
    other = write_tiny_llama(tmp_path / "other.gguf", llama__rope__freq_base=3e5)
    path = tmp_path / "link.gguf"
    path.symlink_to(model)
    llm = opened(path)
    cache = cached(llm, daemon)
    llm.set_cache(cache)
    before = answer(opened(model), PROMPT)
    if how in ("renamed over", "link"):
        replaced(how, path, other)
    elif how == "in place":
        weights = model.read_bytes()
        with open(model, "r+b") as file:
            file.seek(len(weights) // 2)
            file.write(b"\0" * 4096)
    else:
        os.chmod(model, 0o600)
    stored = cache.cache_size
    answered = answer(llm, PROMPT)
    if how == "in place":
        assert cache.cache_size == stored and "was written to" in cache.last_receipt
        with pytest.raises(KeyError, match="was written to"):
            cache[OTHER]
    else:
        held = cache.session.lookup(np.array(PROMPT, np.int32)).blocks
        assert (answered, held) == (before, 5), f"the old bytes are still mapped: {cache.last_receipt}"
    cache.close()


@pytest.mark.parametrize("how", ["renamed over", "link"])
@pytest.mark.parametrize("use_mmap", [True, False])
def test_a_file_that_was_replaced_before_the_digest_is_refused(
    model: Path, tmp_path: Path, how: str, use_mmap: bool
) -> None:
    other = write_tiny_llama(tmp_path / "other.gguf", llama__rope__freq_base=3e5)
    path = tmp_path / "link.gguf"
    path.symlink_to(model)
    llm = opened(path, use_mmap=use_mmap)
    replaced(how, path, other)
    with pytest.raises(ValueError, match=r"was replaced|younger than this process"):
        cached(llm, tmp_path)
    cached(llm, tmp_path, weights_digest="known").close()


def test_a_file_that_is_not_mapped_and_older_than_the_process_is_known(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = opened(model, use_mmap=False)
    with pytest.raises(ValueError, match=r"younger than this process.*weights_digest="):
        cached(llm, tmp_path)
    monkeypatch.setattr("kvstore_connectors.llama_identity.process_began", lambda: os.stat(model).st_ctime + 1)
    cached(llm, tmp_path).close()
