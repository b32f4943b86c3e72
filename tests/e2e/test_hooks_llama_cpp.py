"""The cache for llama-cpp-python, on the real llama.cpp and the real daemon.

Needs llama-cpp-python, in an environment of its own (docs/llama-cpp.md); skipped by name elsewhere.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_client.testing import ConnectorContract, DaemonProcess

if importlib.util.find_spec("llama_cpp") is None:
    pytest.skip("llama-cpp-python is not installed", allow_module_level=True)

import llama_cpp
from llama_cpp import Llama, LlamaRAMCache

from kvstore_client.paths import costs_file
from kvstore_connectors.llama_cpp import KVStoreLlamaCache, PromptClock
from kvstore_connectors.llama_identity import file_digest, fingerprint_of
from kvstore_connectors.llama_probe import probed_state
from kvstore_restore.choice import LoadChoice
from tests.reference.tiny_llama import write_tiny_llama

BLOCK = 64
PROMPT = [3 + (7 * position) % 200 for position in range(5 * BLOCK + 10)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


def opened(model: Path, **settings: Any) -> Llama:
    return Llama(str(model), **({"n_ctx": 512, "n_threads": 1, "verbose": False} | settings))


def answer(llm: Llama, prompt: list[int]) -> str:
    return str(llm.create_completion(prompt, max_tokens=8, temperature=0.0)["choices"][0]["text"])


@pytest.mark.slow
class TestLlamaCpp(ConnectorContract):
    engine = "tests.reference.llama_cpp_engine:open_llama_cpp_engine"


@pytest.mark.parametrize("flash_attn", [False, True])
def test_a_restored_state_is_bit_for_bit_the_computed_one(daemon: DaemonProcess, model: Path, flash_attn: bool) -> None:
    first, second = (opened(model, flash_attn=flash_attn) for _ in range(2))
    stored, restored = (
        KVStoreLlamaCache(llm, daemon.socket_dir, deadline_s=5.0, always_load=True) for llm in (first, second)
    )
    first.eval(PROMPT)
    stored[PROMPT] = first.save_state()
    whole = stored.fingerprint.payload_bytes() * 5
    assert PROMPT in restored
    state = restored[PROMPT]
    assert restored.restored_tokens == second.n_tokens == state.n_tokens == 5 * BLOCK
    assert list(state.input_ids[: 5 * BLOCK]) == PROMPT[: 5 * BLOCK]
    first.n_tokens = 5 * BLOCK
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(first._ctx.ctx), -1, 5 * BLOCK, -1)
    assert state.llama_state == first.save_state().llama_state
    assert state.llama_state_size > whole
    assert stored.cache_size == whole
    stored.close()
    restored.close()


def test_completions_with_and_without_the_cache_are_the_same(daemon: DaemonProcess, model: Path) -> None:
    plain = opened(model)
    prompts = [PROMPT[:300], [*PROMPT[:200], *range(10, 90)], PROMPT]
    expected = [answer(plain, prompt) for prompt in prompts]
    for _ in range(2):  # the second time another process's worth of state is there to restore
        llm = opened(model)
        cache = KVStoreLlamaCache(llm, daemon.socket_dir, deadline_s=5.0, always_load=True)
        llm.set_cache(cache)
        assert [answer(llm, prompt) for prompt in prompts] == expected
        cache.close()


def test_the_daemon_receives_the_length_of_the_answer(
    daemon: DaemonProcess, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = opened(model)
    cache = KVStoreLlamaCache(llm, daemon.socket_dir, deadline_s=5.0, always_load=True)
    llm.set_cache(cache)
    hinted: list[tuple[int, int]] = []
    hint = cache.session.hint

    def heard(tokens: Any, *, answer_tokens: int) -> int:
        hinted.append((hint(tokens, answer_tokens=answer_tokens), answer_tokens))
        return hinted[-1][0]

    monkeypatch.setattr(cache.session, "hint", heard)
    prompt = [token + 7 for token in PROMPT]
    answer(llm, prompt)
    assert [blocks for blocks, _ in hinted] == [(len(prompt) + hinted[0][1]) // BLOCK]
    assert 7 <= hinted[0][1] <= 8, "its last token need not be computed"
    cache[prompt[:200]] = llm.save_state()  # of no prompt that was asked for
    assert len(hinted) == 1
    cache.close()


def test_what_the_model_holds_itself_is_not_fetched(daemon: DaemonProcess, model: Path) -> None:
    llm = opened(model)
    cache = KVStoreLlamaCache(llm, daemon.socket_dir, deadline_s=5.0, always_load=True)
    llm.set_cache(cache)
    prompt = [token + 1 for token in PROMPT]
    answer(llm, prompt)
    gets = cache.session.statistics().gets
    answer(llm, [*prompt[:-3], 9, 9])
    assert cache.session.statistics().gets == gets, "asked for nothing: the model has it"
    cache.close()


def test_a_state_that_llama_cpp_refuses_is_a_miss(daemon: DaemonProcess, model: Path) -> None:
    """The hook never trusts a stored state to be loadable: a refusal leaves an empty model."""
    llm, other = opened(model), opened(model)
    cache = KVStoreLlamaCache(llm, daemon.socket_dir, deadline_s=5.0, always_load=True)
    writer = KVStoreLlamaCache(other, daemon.socket_dir, deadline_s=5.0, always_load=True)
    prompt = [token + 2 for token in PROMPT]
    other.eval(prompt)
    writer[prompt] = other.save_state()
    object.__setattr__(cache._shape, "architecture", b"other")
    with pytest.raises(KeyError, match="does not accept"):
        cache[prompt]
    assert llm.n_tokens == 0
    llm.set_cache(cache)
    assert answer(llm, prompt) == answer(opened(model), prompt)
    cache.close()
    writer.close()


def test_what_differs_shares_nothing(model: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other.gguf", llama__rope__freq_base=5e5)
    copy = tmp_path / "renamed.gguf"
    copy.write_bytes(model.read_bytes())

    def digest(path: Path, **settings: Any) -> bytes:
        llm = opened(path, **settings)
        cache = KVStoreLlamaCache(llm, tmp_path)
        cache.close()
        return cache.fingerprint.digest()

    same = digest(model)
    assert digest(copy) == same, "a file's name is no part of it"
    different = [
        digest(other),
        digest(model, flash_attn=True),
        digest(model, rope_freq_base=2e4),
        digest(model, n_ctx=256),
    ]
    different.append(digest(model, type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32))
    assert len({same, *different}) == 6


def test_all_parts_of_a_split_model_are_digested(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{part}-of-00002.gguf" for part in (1, 2)]
    for part in parts:
        part.write_bytes(b"weights")
    before = file_digest(parts[0])
    parts[1].write_bytes(b"others!")
    assert file_digest(parts[0]) != before


def test_without_a_daemon_it_is_an_empty_cache(model: Path, tmp_path: Path) -> None:
    llm = opened(model)
    cache = KVStoreLlamaCache(llm, tmp_path)
    llm.set_cache(cache)
    assert answer(llm, PROMPT) == answer(opened(model), PROMPT)
    assert PROMPT not in cache and cache.cache_size == 0
    with pytest.raises(KeyError):
        cache[[1, 2, 3]]
    cache.close()


def test_a_model_that_needs_all_scores_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="logits_all"):
        KVStoreLlamaCache(opened(model, logits_all=True), tmp_path)


def test_a_live_model_is_left_as_it_was(model: Path, tmp_path: Path) -> None:
    llm = opened(model)
    llm.eval(PROMPT[:100])
    before = llm.save_state()
    cache = KVStoreLlamaCache(llm, tmp_path)
    assert llm.save_state().llama_state == before.llama_state and llm.n_tokens == 100
    assert cache.fingerprint == fingerprint_of(llm, probed_state(llm), file_digest(model))
    cache[PROMPT[:100]] = llm.save_state()
    assert "seen to evaluate" in cache.last_receipt, "what it held before it was watched is nobody's to vouch for"
    cache.close()


@pytest.mark.parametrize(("token_s", "restored"), [(1e-9, 0), (1.0, 5 * BLOCK)])
def test_what_is_computed_faster_than_loaded_is_computed(
    daemon: DaemonProcess,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    token_s: float,
    restored: int,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prompt = [token + 3 for token in PROMPT]
    writer = opened(model)
    stored = KVStoreLlamaCache(writer, daemon.socket_dir, deadline_s=5.0, always_load=True)
    writer.eval(prompt)
    stored[prompt] = writer.save_state()
    known = LoadChoice()
    for tokens in (64, 512, 128, 1024, 256) * 3:
        known.observe_compute(0, tokens, token_s * tokens)
    known.save(costs_file(stored.fingerprint.digest()))
    llm = opened(model)
    cache = KVStoreLlamaCache(llm, daemon.socket_dir, deadline_s=5.0)
    llm.set_cache(cache)
    assert answer(llm, prompt) == answer(opened(model), prompt)
    assert cache.restored_tokens == restored
    cache.close()
    stored.close()


def test_what_computing_took_is_learned_and_kept(
    daemon: DaemonProcess, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    llm = opened(model, n_batch=128)
    cache = KVStoreLlamaCache(llm, daemon.socket_dir, deadline_s=5.0)
    llm.set_cache(cache)
    prompt = [token + 4 for token in PROMPT]
    begin = time.perf_counter()
    answer(llm, prompt)
    took_s = time.perf_counter() - begin
    cache.close()
    known = LoadChoice.load(costs_file(cache.fingerprint.digest()))
    assert 0 < known.known_compute_s(0, len(prompt)) < took_s


def test_counters_that_stand_still_or_begin_anew_count_nothing(model: Path) -> None:
    silent = opened(model, no_perf=True)
    clock = PromptClock(silent)
    clock.start()
    silent.eval(PROMPT)
    assert clock.stop() == (0, 0.0)
    llm = opened(model)
    clock = PromptClock(llm)
    assert clock.stop() == (0, 0.0)
    answer(llm, PROMPT)
    clock.start()
    llama_cpp.llama_perf_context_reset(llm._ctx.ctx)
    assert clock.stop() == (0, 0.0)
    clock.start()
    llm.reset()
    answer(llm, PROMPT[:100])
    tokens, seconds = clock.stop()
    assert tokens == 100 and seconds > 0


SMOL = Path.home() / ".cache/kvstored/models/SmolLM2-135M-Instruct.Q4_1.gguf"
_CHILD = """
import sys
from llama_cpp import Llama
from kvstore_connectors.llama_cpp import KVStoreLlamaCache
llm = Llama(sys.argv[1], n_ctx=2048, n_threads=2, verbose=False)
cache = KVStoreLlamaCache(llm, sys.argv[2], deadline_s=5.0, always_load=True)
llm.set_cache(cache)
text = llm.create_completion(sys.argv[3], max_tokens=16, temperature=0.0)["choices"][0]["text"]
print(cache.restored_tokens, repr(text))
"""


@pytest.mark.slow
@pytest.mark.skipif(not SMOL.exists(), reason="SmolLM2's GGUF is not in the model cache: run `make demo` once")
def test_a_real_model_in_two_processes_gives_the_same_text() -> None:
    prompt = "The ferry leaves at seven, ten and four from the west quay. " * 24 + "Q: When does the ferry leave? A:"
    settings = "host.capacity=256MiB", "host.staging=64MiB", "host.arena=16MiB", "limits.staging_per_client=32MiB"
    with DaemonProcess(*settings) as daemon:
        command = [sys.executable, "-c", _CHILD, str(SMOL), str(daemon.socket_dir), prompt]
        runs = [subprocess.run(command, capture_output=True, text=True, timeout=230) for _ in range(2)]
        (cold, cold_text), (warm, warm_text) = (run.stdout.split(" ", 1) for run in runs)
    assert (int(cold), cold_text) == (0, warm_text)
    assert int(warm) >= 5 * BLOCK


def test_the_stock_cache_and_ours_agree_on_what_a_miss_is() -> None:
    with pytest.raises(KeyError):
        LlamaRAMCache()[[1, 2, 3]]
