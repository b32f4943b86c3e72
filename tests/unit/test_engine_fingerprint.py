"""The fingerprint tells apart whatever K/V bytes depend on, and sizes blocks as the pool does."""

import dataclasses
from pathlib import Path

import pytest

from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model import ModelConfig
from kvstore_engine.pool import ENGINE_BLOCK_TOKENS, PAYLOAD_LAYOUT, BlockPool
from kvstore_engine.restore import model_fingerprint
from kvstore_proto.fingerprint import Fingerprint
from tests.reference.tiny_llama import write_tiny_llama

FIELDS = {
    "weights_digest": "ab" * 16,
    "tokenizer_digest": "cd" * 16,
    "kv_dtype": "f16",
    "kv_item_bytes": 2,
    "engine_block_tokens": ENGINE_BLOCK_TOKENS,
    "layout": PAYLOAD_LAYOUT,
}


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    with GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf")) as file:
        return ModelConfig.from_gguf(file)


def _fingerprint(config: ModelConfig, **changes: object) -> Fingerprint:
    return model_fingerprint(config, **{**FIELDS, **changes})


def test_payloads_are_as_large_as_the_pools_blocks(config: ModelConfig) -> None:
    pool = BlockPool(config, 4)
    fingerprint = _fingerprint(config)
    assert fingerprint.payload_bytes() == pool.payload_bytes(64 // ENGINE_BLOCK_TOKENS)
    assert fingerprint.groups[0].kind == "full"
    assert fingerprint.groups[0].layers == tuple(range(config.layers))


@pytest.mark.parametrize(
    "change",
    [
        {"weights_digest": "ef" * 16},
        {"tokenizer_digest": "ef" * 16},
        {"kv_dtype": "f32", "kv_item_bytes": 4},
        {"engine_block_tokens": 32},
        {"layout": "other"},
        {"block_tokens": 128},
    ],
)
def test_each_part_changes_the_digest(config: ModelConfig, change: dict[str, object]) -> None:
    assert _fingerprint(config, **change).digest() != _fingerprint(config).digest()


def test_rope_changes_the_digest_and_the_name_does_not(config: ModelConfig) -> None:
    other = dataclasses.replace(config, rope=dataclasses.replace(config.rope, frequency_base=5e5))
    assert _fingerprint(other).digest() != _fingerprint(config).digest()
    renamed = dataclasses.replace(config, name="another name")
    assert _fingerprint(renamed).digest() == _fingerprint(config).digest()
