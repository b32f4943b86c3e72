"""Stages and a real daemon: each stage finds its own layers again, and other cuts of the model the hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Session
from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.weights import Model, load_model
from kvstore_engine.pool import PAYLOAD_LAYOUT, BlockPool
from kvstore_engine.restore.fingerprint import model_fingerprint
from kvstore_engine.stages.pipeline import open_pipeline, stage_layers
from kvstore_engine.stages.restorer import StagedRestorer
from kvstore_engine.stages.stores import StageStore, stage_fingerprints, store_prefix
from kvstore_proto.fingerprint import Fingerprint
from tests.reference.make_gguf import TinyModel, write_model
from tests.reference.prefill import prefill
from tests.reference.running_daemon import RunningDaemon, running_daemon
from tests.reference.skips import skip_without_ggml

_SHAPE = TinyModel(layers=4, width=64, heads=4, kv_heads=2, head_dim=32, feed_forward=96, quantisation="q8_0")
_TOKENS = np.random.default_rng(5).integers(0, _SHAPE.vocabulary, 64 * 5 + 9).astype(np.int32)
_TABLE = np.random.default_rng(6).permutation(24).astype(np.int32)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    skip_without_ggml()
    with load_model(GGUFFile.open(write_model(tmp_path / "m.gguf", _SHAPE))) as model:
        yield model


def _session(daemon: RunningDaemon, fingerprint: Fingerprint) -> Session:
    return daemon.connect(fingerprint, staging_bytes=256 * 1024)  # there are seven of them


def _stores(stack: ExitStack, daemon: RunningDaemon, pool: BlockPool, model: Model, stages: int) -> list[StageStore]:
    whole = model_fingerprint(
        model.config,
        weights_digest="ab" * 16,
        tokenizer_digest="cd" * 16,
        kv_dtype=pool.kv_dtype,
        kv_row_bytes=pool.row_bytes,
        engine_block_tokens=pool.block_tokens,
        layout=PAYLOAD_LAYOUT,
    )
    return [
        StageStore(*(None if each is None else stack.enter_context(_session(daemon, each)) for each in prints))
        for prints in stage_fingerprints(whole, stage_layers(model.config.layers, stages), model.config.width)
    ]


def test_stages_restore_from_a_daemon_what_they_stored_there(model: Model) -> None:
    pool = BlockPool(model.config, 24)
    with Executor(model, pool, StepSizes(threads=1)) as executor:
        wanted = prefill(executor, _TOKENS, 0, _TABLE)
    with running_daemon() as daemon:
        for stages in (2, 4):
            pool.planes.fill(0xFF)
            with ExitStack() as stack:
                stores = _stores(stack, daemon, pool, model, stages)
                pipeline = stack.enter_context(open_pipeline(model, pool, stages))
                restorer = stack.enter_context(StagedRestorer(pipeline, stores, loads_all=True))
                logits, restored = restorer.prefill(_TOKENS, _TABLE, keeps_inputs=True)
                np.testing.assert_array_equal(logits, wanted)
                assert [each.stored for each in restored.stages] == [0] * stages
                # The four stages' third begins where the second of two began, and found its states.
                assert [each.inputs > 0 for each in restored.stages] == [
                    stages == 4 and at == 2 for at in range(stages)
                ]
                for stored in store_prefix(pipeline, stores, _TOKENS, _TABLE, restored.inputs):
                    assert set(stored.kv) | set(stored.inputs) <= {"stored", "present"} and not stored.failure
                pool.planes.fill(0xFF)
                logits, restored = restorer.prefill(_TOKENS, _TABLE)
                np.testing.assert_array_equal(logits, wanted)
                assert [(each.loaded, each.computed) for each in restored.stages] == [(5, 0)] * stages
