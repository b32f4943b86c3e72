"""Weights are in the file's map, repacked by ggml, or interleaved by ourselves; what that costs and changes."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.gguf.reader import TensorInfo
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.kernels import select_kernels
from kvstore_engine.model.placement import copied_bytes, order_of_sums
from kvstore_engine.model.weights import Model, load_model
from kvstore_engine.pool import BlockPool
from kvstore_proto.ggml_types import Q4_0, Q8_0
from tests.reference.make_gguf import TinyModel, write_model

_TINY = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, feed_forward=32)
_TINY_Q8 = replace(_TINY, quantisation="q8_0")
_WIDER = TinyModel(layers=2, width=64, heads=2, kv_heads=1, head_dim=32, feed_forward=96, quantisation="q8_0")
_OURS = bool(select_kernels().q8_product_address)


def test_weights_are_repacked_where_this_cpu_can_and_used_in_place_elsewhere(tmp_path: Path) -> None:
    for quantisation in ("q4_0", "q8_0", "f32"):
        path = write_model(tmp_path / f"{quantisation}.gguf", replace(_TINY, quantisation=quantisation))
        with load_model(GGUFFile.open(path), repack=False) as plain, load_model(GGUFFile.open(path)) as model:
            assert plain.repacked_bytes == 0
            repackable = {
                "q4_0": bool(model.library.extra_buffer_types()),
                "q8_0": bool(select_kernels().q8_product_address),
                "f32": False,
            }
            assert (model.repacked_bytes > 0) == repackable[quantisation]


def test_a_matrix_that_does_not_go_into_groups_of_eight_rows_stays_in_place(tmp_path: Path) -> None:
    path = write_model(tmp_path / "odd.gguf", replace(_TINY_Q8, vocabulary=321))
    with load_model(GGUFFile.open(path)) as model:
        assert not model.output.interleaved
        assert model.layers[0].ffn_down.interleaved == bool(select_kernels().q8_product_address)


def test_what_was_repacked_is_not_resident_twice(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", replace(_TINY_Q8, width=256, feed_forward=512))
    with GGUFFile.open(path) as plain:
        plain.data.sum()  # reads all of it
        assert _resident_bytes(path) >= 0.9 * plain.data.size
        plain.release()
        plain.weights_digest()
        assert _resident_bytes(path) <= 0.1 * plain.data.size
        with load_model(GGUFFile.open(path)) as model:
            expected = model.file.data.size - model.repacked_bytes
            assert _resident_bytes(path) <= expected + 0.1 * model.file.data.size


def _resident_bytes(path: Path) -> int:
    """Return the resident bytes of all maps of the file in this process."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [at for at, line in enumerate(lines) if line.endswith(str(path))]
    return sum(int(next(line for line in lines[at:] if line.startswith("Rss:")).split()[1]) * 1024 for at in starts)


def _logits(model: Model, *, threads: int = 1) -> npt.NDArray[np.float32]:
    tokens = np.random.default_rng(3).integers(0, 256, 48).astype(np.int32)
    pool = BlockPool(model.config, 4)
    with Executor(model, pool, StepSizes(threads=threads, max_sequences=1, max_context=64)) as executor:
        return executor.forward([SequenceSlice(tokens, 0, np.arange(4, dtype=np.int32), "all")])


@pytest.mark.parametrize("vocabulary", [320, 321])
def test_interleaved_weights_give_what_those_in_place_give_but_for_rounding(tmp_path: Path, vocabulary: int) -> None:
    """321: the output matrix stays in place, beside others that do not."""
    path = write_model(tmp_path / "model.gguf", replace(_WIDER, vocabulary=vocabulary))
    with load_model(GGUFFile.open(path)) as model, load_model(GGUFFile.open(path), repack=False) as plain:
        ours, theirs = _logits(model), _logits(plain)
    np.testing.assert_allclose(ours, theirs, atol=0.1 * theirs.std())


def test_executors_share_a_model(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", _WIDER)
    found: dict[int, npt.NDArray[np.float32]] = {}
    with load_model(GGUFFile.open(path)) as model:
        threads = [
            threading.Thread(target=lambda count=count: found.update({count: _logits(model, threads=count)}))
            for count in (1, 2, 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 3
    for logits in found.values():
        np.testing.assert_array_equal(logits, found[1])


def test_other_kernels_than_the_weights_were_laid_out_for_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", _TINY_Q8)
    with load_model(GGUFFile.open(path)) as model:
        pool = BlockPool(model.config, 4, kernels=select_kernels("reference"))
        if not _OURS:
            pytest.skip("this processor leaves products to ggml")
        with pytest.raises(ValueError, match="repack=False"):
            Executor(model, pool)


def test_the_order_of_sums_is_named_for_q8_0_alone(tmp_path: Path) -> None:
    for quantisation, expected in (("q8_0", "q8_0-by-columns" if _OURS else ""), ("q4_0", ""), ("f16", "")):
        with GGUFFile.open(write_model(tmp_path / quantisation, replace(_TINY, quantisation=quantisation))) as file:
            assert order_of_sums(file) == expected


def test_an_output_matrix_changes_no_k_and_v() -> None:
    """Files in q4_0 often have embeddings and output in q8_0."""

    def named_order(of_embeddings: int, of_others: int) -> str:
        types = {"token_embd.weight": of_embeddings, "blk.0.attn_k.weight": of_others}
        tensors = {name: TensorInfo(name, kind, "", (32, 64), 0, 0) for name, kind in types.items()}
        return order_of_sums(cast(GGUFFile, SimpleNamespace(tensors=tensors)))

    assert named_order(Q8_0, Q4_0) == ""
    assert bool(named_order(Q8_0, Q8_0)) == _OURS


@pytest.mark.parametrize("tied", [False, True])
def test_copies_take_no_more_than_is_said(tmp_path: Path, tied: bool) -> None:
    path = write_model(tmp_path / "model.gguf", replace(_WIDER, tied=tied))
    with load_model(GGUFFile.open(path)) as model:
        assert model.repacked_bytes == (copied_bytes(model.file) if _OURS else 0)
