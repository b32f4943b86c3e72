"""The engine over the real client: its sockets, its shared memory, its leases; the daemon alone is a double."""

from pathlib import Path

import pytest

from kvstore_engine import loaded_model
from kvstore_engine.batching.request import RequestSettings
from kvstore_engine.generation import Generation, Prompt
from kvstore_engine.loaded_model import LoadOptions, open_model
from tests.reference.assumed_costs import assume
from tests.reference.fake_daemon import FakeDaemon
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import byte_level_vocabulary, write_tiny_llama

PROMPT = Prompt("the cat sat on the mat and the hat of the rat that ran. " * 16)
SETTINGS = RequestSettings(max_tokens=30, ignore_end=True)


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_ggml()
    # Only the cost profile: the compiled kernels stay in the user's cache, they take seconds to build.
    monkeypatch.setattr(loaded_model, "cache_root", lambda: tmp_path / "cache")


def _answer(
    model: Path, sockets: Path, stages: int = 1, *, whole_blocks: bool = False, device: str = "cpu"
) -> Generation:
    """One answer by a freshly loaded engine that computes slowly enough to want what is stored."""
    options = LoadOptions(
        threads=1, kvstore=sockets, warm_up=False, stages=stages, whole_blocks=whole_blocks, device=device
    )
    with open_model(model, options) as loaded:
        assume(loaded.generator.costs)
        return loaded.generator.generate(PROMPT, SETTINGS)


@pytest.mark.parametrize("device", ["cpu", "torch:cpu"])
def test_a_second_engine_restores_what_the_first_stored(tmp_path: Path, device: str) -> None:
    if device != "cpu":
        pytest.importorskip("torch", reason="needs the extra torch")
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    with FakeDaemon(tmp_path / "s") as daemon:
        cold = _answer(model, daemon.directory, device=device)
        warm = _answer(model, daemon.directory, device=device)
        assert cold.store.stored == len(daemon.blocks) > 2
        assert cold.tokens_restored == 0
        assert warm.tokens_restored == (warm.prompt_tokens - 1) // 64 * 64
        assert warm.tokens == cold.tokens
        assert warm.store.failed == 0


def test_an_engine_in_stages_restores_whole_blocks_that_one_without_stored(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    with FakeDaemon(tmp_path / "s") as daemon:
        cold = _answer(model, daemon.directory)
        warm = _answer(model, daemon.directory, stages=2, whole_blocks=True)
    with FakeDaemon(tmp_path / "t") as daemon:
        staged = _answer(model, daemon.directory, stages=2, whole_blocks=True)
    assert warm.tokens_restored == (warm.prompt_tokens - 1) // 64 * 64 and not staged.tokens_restored
    assert warm.tokens == staged.tokens == cold.tokens
    assert staged.store.stored == cold.store.stored > 2


def test_another_model_state_restores_nothing(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    other = write_tiny_llama(tmp_path / "other.gguf", llama__rope__freq_base=5e5)
    relabelled = write_tiny_llama(tmp_path / "re.gguf", byte_level_vocabulary(), tokenizer__ggml__pre="qwen2")
    with FakeDaemon(tmp_path / "s") as daemon:
        _answer(model, daemon.directory)
        assert _answer(other, daemon.directory).tokens_restored == 0
        assert _answer(relabelled, daemon.directory).tokens_restored == 0


def test_a_daemon_that_dies_is_survived(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    daemon = FakeDaemon(tmp_path / "s")
    with open_model(model, LoadOptions(threads=1, kvstore=daemon.directory, warm_up=False)) as loaded:
        assume(loaded.generator.costs)
        first = loaded.generator.generate(PROMPT, SETTINGS)
        daemon.stop()
        second = loaded.generator.generate(PROMPT, SETTINGS)
    assert first.store.stored > 2
    assert second.tokens == first.tokens
    assert second.tokens_restored == 0
