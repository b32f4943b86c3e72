"""The fingerprint covers everything that K/V bytes depend on, and sizes blocks as the pool does."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.pool import ENGINE_BLOCK_TOKENS, PAYLOAD_LAYOUT, BlockPool
from kvstore_engine.restore.fingerprint import model_fingerprint
from kvstore_proto.fingerprint import Fingerprint
from tests.reference.leased_memory import lease_over
from tests.reference.make_gguf import TinyModel, write_model
from tests.reference.tiny_llama import write_tiny_llama

FIELDS = {
    "weights_digest": "ab" * 16,
    "tokenizer_digest": "cd" * 16,
    "kv_dtype": "f16",
    "kv_row_bytes": 64,
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


def test_arrays_of_a_payload_are_the_rows_of_the_pool(config: ModelConfig) -> None:
    pool, ids = BlockPool(config, 8), [5, 1, 6, 2]
    pool.planes[...] = np.random.default_rng(0).integers(0, 256, pool.planes.shape, dtype=np.uint8)
    fingerprint = _fingerprint(config, kv_row_bytes=pool.row_bytes)
    payload = np.empty(fingerprint.payload_bytes(), np.uint8)
    pool.gather_block(ids, payload)
    lease, _ = lease_over(fingerprint, [payload])
    for layer in range(config.layers):
        for plane, kind in enumerate("kv"):
            rows = pool.planes[2 * layer + plane, ids].view(np.float16).reshape(64, config.kv_heads, config.head_dim)
            assert np.asarray(lease.array(0, layer, kind=kind)).tobytes() == rows.tobytes()


@pytest.mark.parametrize(
    "change",
    [
        {"weights_digest": "ef" * 16},
        {"tokenizer_digest": "ef" * 16},
        {"kv_dtype": "f32", "kv_row_bytes": 128},
        {"engine_block_tokens": 32},
        {"layout": "other"},
        {"order_of_sums": "other"},
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


_WINDOWED = TinyModel(
    architecture="gemma3", layers=7, metadata={"llama.attention.sliding_window": 64, "llama.rope.freq_base": 1e6}
)
_LONGROPE = TinyModel(
    architecture="phi3", long_short=True, metadata={"llama.rope.scaling.original_context_length": 256}
)


def _read(path: Path, model: TinyModel, context: int | None = None) -> ModelConfig:
    with GGUFFile.open(write_model(path, model)) as file:
        return ModelConfig.from_gguf(file, context)


def test_every_setting_of_key_rotation_changes_the_digest(tmp_path: Path) -> None:
    gemma, phi = _read(tmp_path / "g.gguf", _WINDOWED), _read(tmp_path / "p.gguf", _LONGROPE)
    assert gemma.local_rope is not None
    others = [
        gemma,
        dataclasses.replace(gemma, rope=dataclasses.replace(gemma.rope, neox=False)),
        dataclasses.replace(gemma, rope=dataclasses.replace(gemma.rope, attention_factor=1.2)),
        dataclasses.replace(gemma, rope=dataclasses.replace(gemma.rope, dimensions=32)),
        dataclasses.replace(gemma, local_rope=dataclasses.replace(gemma.local_rope, frequency_base=2e4)),
        dataclasses.replace(gemma, local_rope=None),
        dataclasses.replace(gemma, windows=(64,) * 7),
        phi,
        _read(tmp_path / "long.gguf", _LONGROPE, context=512),
    ]
    assert len({_fingerprint(config).digest() for config in others}) == len(others)


def test_what_changes_the_next_layers_input_changes_the_digest(tmp_path: Path) -> None:
    gemma = _read(tmp_path / "g.gguf", _WINDOWED)
    others = [
        gemma,
        dataclasses.replace(gemma, windows=tuple(size and 32 for size in gemma.windows)),
        dataclasses.replace(gemma, attention_softcap=50.0),
        dataclasses.replace(gemma, attention_scale=0.1),
    ]
    assert len({_fingerprint(config).digest() for config in others}) == len(others)


def test_a_plain_llamas_rotation_is_spelt_as_ever(config: ModelConfig) -> None:
    assert _fingerprint(config).rope == "norm/16/base=10000/scale=1"
