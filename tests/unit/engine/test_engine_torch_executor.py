"""The parts that only torch's executor has: weights of any quantisation, by ggml's as the yardstick, recorded steps,
refusals; and our CUDA kernels in its step, run on the host. The rest: tests/contract/test_executor_contract.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_engine.devices import SCALED_KV_TYPES
from kvstore_engine.errors import UsageError
from kvstore_engine.executors import DeviceName, PoolSetup, StepExecutor, StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.kernels.cuda.attention import AttentionCrossover
from kvstore_engine.kernels.cuda.program import CacheShape
from kvstore_engine.opening import open_executor
from tests.cuda_shim.launcher import ShimLauncher
from tests.reference.cache_windows import AskedDevice
from tests.reference.cuda_cache import Plane
from tests.reference.examples import examples
from tests.reference.make_gguf import TinyModel, write_model

pytest.importorskip("torch", reason="needs the extra torch")

from kvstore_engine.loaded_model import fingerprint_of
from kvstore_engine.tokenizer import Tokenizer
from kvstore_engine.torch_executor.attention import KernelAttention, ReferenceAttention
from kvstore_engine.torch_executor.cache import ScaledRows
from kvstore_engine.torch_executor.executor import TorchExecutor
from kvstore_engine.torch_executor.model import TorchModel
from kvstore_engine.torch_executor.opening import new_pool
from kvstore_engine.torch_executor.planes import pieces
from kvstore_engine.torch_executor.prefix_window import PrefixWindow
from kvstore_engine.torch_executor.recordings import Replay, bucket_of, context_bound

_BLOCKS, _SIZES = 24, StepSizes(threads=1, max_context=160)
_SETUP = PoolSetup(_BLOCKS, 16, "f16")
_WINDOW = {"llama.attention.sliding_window": 40}
_MODELS = {
    "llama": TinyModel(rope_factors=True, biases=("attn_q", "ffn_up")),
    "qwen2-q8_0": TinyModel(architecture="qwen2", tied=True, quantisation="q8_0"),
    "qwen3-yarn": TinyModel(
        architecture="qwen3",
        metadata={
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 512,
        },
    ),
    "qwen3-yarn-shorter": TinyModel(
        architecture="qwen3",
        metadata={
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 0.5,
            "llama.rope.scaling.yarn_beta_fast": 16.0,
        },
    ),
    "gemma2": TinyModel(architecture="gemma2", metadata={**_WINDOW, "llama.attn_logit_softcapping": 3.0}),
    "gemma3": TinyModel(architecture="gemma3", layers=7, metadata={**_WINDOW, "llama.rope.freq_base": 1e6}),
    "phi3-q4_k": TinyModel(architecture="phi3", width=256, kv_heads=4, quantisation="q4_k"),
}
# Of the logits' spread, root mean square: what bf16 products of a tiny random model were seen to cost is below 0.014.
_BOUND = 0.03
_QUANTISED_BOUND = 0.06  # ggml rounds activations to 8 bits there

FloatArray = npt.NDArray[np.float32]


def _tokens(count: int, seed: int = 1) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, TinyModel().vocabulary, count).astype(np.int32)


def _table(seed: int = 7) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).permutation(_BLOCKS)[:10].astype(np.int32)


def _device(name: str) -> DeviceName:
    return DeviceName.parse(name)


def _logits(executor: StepExecutor, cuts: list[int]) -> FloatArray:
    parts, start = [], 0
    for count in cuts:
        parts.append(executor.forward([SequenceSlice(_tokens(150)[start : start + count], start, _table(), "all")]))
        start += count
    return np.concatenate(parts)


@pytest.mark.parametrize("name", _MODELS)
def test_logits_are_ggmls_within_the_rounding_of_bf16(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "m.gguf", _MODELS[name])
    cuts = [64, 47, 1, 1, 1, 1]
    found = []
    for device in ("cpu", "torch:cpu"):
        with open_executor(GGUFFile.open(path), _device(device), _SETUP, _SIZES) as executor:
            found.append(_logits(executor, cuts))
    difference = np.sqrt(np.mean(np.square(found[1] - found[0], dtype=np.float64)))
    bound = (_QUANTISED_BOUND if "q" in name.rpartition("-")[2] else _BOUND) * found[0].std()
    assert 0 < difference < bound
    best = np.take_along_axis(found[0], found[1].argmax(1)[:, None], 1)[:, 0]
    assert (found[0].max(1) - best <= 6 * bound).all(), "a greedy token differs only where two are nearly as likely"


@pytest.mark.parametrize("kv_dtype", ["f16", "int8", "fp8"])
def test_the_step_with_our_kernels_is_the_step_in_plain_torch(tmp_path: Path, kv_dtype: str) -> None:
    """Prompts and padded decodes, with windows and caps; the kernels are the GPU's source, compiled for the host."""
    path = write_model(tmp_path / "m.gguf", _MODELS["gemma2"])
    model = TorchModel(GGUFFile.open(path), _device("torch:cpu"), 160)
    found, launchers = [], []
    for makes in (ReferenceAttention, None):
        pool, cache = new_pool(model, replace(_SETUP, kv_dtype=kv_dtype), _SIZES)
        launchers.append(ShimLauncher())
        attention = makes(cache) if makes else KernelAttention(cache, launchers[-1], lambda: 0)
        with TorchExecutor(model, pool, attention, _SIZES) as executor:
            prompts = [SequenceSlice(_tokens(count, count), 0, _table(0)[3 * n : 3 * n + 3]) for n, count in _PROMPTS]
            first = executor.forward(prompts)
            decodes = [SequenceSlice(_tokens(1, n), count, _table(0)[3 * n : 3 * n + 3]) for n, count in _PROMPTS]
            found.append(np.concatenate([first, executor.forward(decodes)]))
    assert {"kv_rope_cache", "kv_paged_attention_v1"} <= set(launchers[1].launched)
    difference = np.sqrt(np.mean(np.square(found[1] - found[0], dtype=np.float64)))
    assert difference < _BOUND / 2 * found[0].std()


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_a_long_context_is_attended_in_one_pass_or_in_partitions(tmp_path: Path, kv_dtype: str) -> None:
    """The crossover decides, with the same result: a token of a sequence whose 700 tokens before are in the cache."""
    torch = pytest.importorskip("torch")
    sizes, setup = StepSizes(threads=1, max_context=800), PoolSetup(48, 16, kv_dtype)
    path = write_model(tmp_path / "m.gguf", _MODELS["gemma2"])
    model = TorchModel(GGUFFile.open(path), _device("torch:cpu"), 800)
    table = np.random.default_rng(3).permutation(48).astype(np.int32)
    found, launchers = [], []
    for crossover in (None, AttentionCrossover(0.0), AttentionCrossover(1e9)):
        pool, cache = new_pool(model, setup, sizes)
        for number, rows in enumerate(rows for layer in range(cache.config.layers) for rows in cache.rows(layer)):
            values = np.random.default_rng(number).standard_normal((768, *_HEADS), dtype=np.float32)
            rows.store(torch.arange(768), torch.from_numpy(values))
        launchers.append(ShimLauncher())
        ours = KernelAttention(cache, launchers[-1], lambda: 0, crossover=crossover) if crossover else None
        with TorchExecutor(model, pool, ours or ReferenceAttention(cache), sizes) as executor:
            found.append(executor.forward([SequenceSlice(_tokens(1), 700, table)]))
    kernels = [{name for name in launcher.launched if "rope" not in name} for launcher in launchers[1:]]
    one_pass, partitions = "kv_paged_attention_v1", {"kv_paged_attention_v2", "kv_merge_partitions"}
    assert kernels == [{one_pass}, partitions | {one_pass}], "a window is one partition"
    for other in found[1:]:
        difference = np.sqrt(np.mean(np.square(other - found[0], dtype=np.float64)))
        assert difference < _BOUND / 2 * found[0].std()


_HEADS = (TinyModel().kv_heads, TinyModel().head_dim)
_PROMPTS = [(0, 5), (1, 44), (2, 17)]


class _Tape:
    """Records by keeping the call, which a replay makes again into the same memory."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, compute: Callable[[], Any]) -> tuple[Replay, Any]:
        self.recorded += 1
        result = compute()

        def replay() -> None:
            self.replayed += 1
            again = compute()
            result.logits.copy_(again.logits)
            result.likeliest.copy_(again.likeliest)

        return replay, result


def test_decode_steps_are_recorded_by_bucket_and_replayed_with_new_inputs(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", TinyModel())
    model = TorchModel(GGUFFile.open(path), _device("torch:cpu"), 160)
    tape, found = _Tape(), []
    for recorder in (None, tape):
        pool, cache = new_pool(model, _SETUP, _SIZES)
        with TorchExecutor(model, pool, ReferenceAttention(cache), _SIZES, recorder) as executor:
            tables = [_table(0)[3 * n : 3 * n + 3] for n in range(3)]
            logits = []
            for position in range(6):
                count = 3 if position < 4 else 1
                step = [SequenceSlice(_tokens(1, position + n), position, tables[n]) for n in range(count)]
                logits.append(executor.forward(step))
                tokens, values = executor.step(step).likeliest(range(count))
                assert tokens == logits[-1].argmax(1).tolist()
                np.testing.assert_array_equal(np.array(values, np.float32), logits[-1].max(1))
            found.append(np.concatenate(logits))
            used = np.concatenate(tables)
            others = [block for block in range(_BLOCKS) if block not in used]
            assert not pool.planes[:, others].any(), "rows of padding are not stored"
    np.testing.assert_array_equal(found[1], found[0])
    assert (tape.recorded, tape.replayed) == (2, 10)  # of 4 rows from the second step on, of 1 row likewise


def test_a_step_is_a_decode_step_if_each_sequence_has_one_token() -> None:
    one = SequenceSlice(_tokens(1), 3, _table())
    assert [bucket_of([one] * count) for count in (1, 2, 3, 5, 33, 64, 65)] == [1, 2, 4, 8, 64, 64, 0]
    assert bucket_of([one, SequenceSlice(_tokens(2), 3, _table())]) == 0
    assert bucket_of([SequenceSlice(_tokens(1), 3, _table(), "none")]) == 0
    assert [context_bound(longest, 512) for longest in (1, 512, 513, 1025, 4096)] == [512, 512, 1024, 2048, 4096]


@pytest.mark.parametrize("kv_dtype", SCALED_KV_TYPES)
def test_scaled_rows_are_stored_as_the_kernels_store_them(kv_dtype: str) -> None:
    """Rows of zeros, of tiny values, and one with elements that e4m3 keeps as subnormals."""
    torch = pytest.importorskip("torch")
    plane, slots = Plane(CacheShape(4, 2, 64, 16, cache=kv_dtype), 3), [0, 17, 47, 5, 31, 40]
    values = np.random.default_rng(1).standard_normal((6, 2, 64)).astype(np.float32)
    values[3], values[4], values[5, :, 1:] = 0, values[4] * 1e-3, values[5, :, 1:] * 1e-5
    memory = torch.from_numpy(plane.memory.copy())
    rows = ScaledRows(memory, kv_dtype, 16, 2, 64)
    read = [plane.write(slot // 16, slot % 16, value) for slot, value in zip(slots, values, strict=True)]
    rows.store(torch.tensor(slots), torch.from_numpy(values))
    np.testing.assert_array_equal(memory.numpy(), plane.memory)
    np.testing.assert_array_equal(rows.load(torch.tensor(slots)).numpy(), np.stack(read))


@settings(max_examples=examples(60), deadline=None)
@given(kv_dtype=st.sampled_from(SCALED_KV_TYPES), seed=st.integers(0, 2**31), spread=st.floats(0, 8))
def test_a_scaled_element_is_within_its_bound_of_the_float(kv_dtype: str, seed: int, spread: float) -> None:
    """`spread`: how many powers of ten a row's elements are apart."""
    torch, random = pytest.importorskip("torch"), np.random.default_rng(seed)
    values = random.standard_normal((8, 2, 64)) * 10.0 ** random.uniform(-spread, 0, (8, 2, 64))
    values *= 10.0 ** random.integers(-20, 20, (8, 1, 1))
    stored = torch.zeros((1, CacheShape(4, 2, 64, 16, cache=kv_dtype).block_bytes), dtype=torch.uint8)
    rows, slots = ScaledRows(stored, kv_dtype, 16, 2, 64), torch.arange(8)
    exact = values.astype(np.float32)
    rows.store(slots, torch.from_numpy(exact))
    greatest = np.abs(exact).max(-1, keepdims=True).astype(np.float64)
    error = np.abs(rows.load(slots).numpy() - exact.astype(np.float64))
    # Beside the rounding to an element, that of the scale and of products by it, in floats.
    allowed = greatest / 254 if kv_dtype == "int8" else np.maximum(np.abs(exact) / 16, greatest / 458_752)
    assert (error <= allowed + greatest * 3e-7).all()


def test_copies_are_cut_into_pieces_that_fit_the_stage() -> None:
    for shape in ((6, 4, 8), (5, 40, 8), (3, 1, 64)):
        covered = np.zeros(shape[:2], int)
        for planes, blocks in pieces(*shape, limit=100):
            covered[planes, blocks] += 1
            assert covered[planes, blocks].size * shape[2] <= 100
        assert (covered == 1).all()


def test_blocks_of_ggml_or_of_another_type_are_no_blocks_of_torch(tmp_path: Path) -> None:
    """int8 and fp8 have blocks of equal size: nothing but the fingerprint tells them apart."""
    file = GGUFFile.open(write_model(tmp_path / "m.gguf", TinyModel()))
    tokenizer, digests, sizes = Tokenizer.from_metadata(file.metadata), set(), {}
    kept = [("cpu", "f16"), *(("torch:cpu", kv_dtype) for kv_dtype in ("f16", "bf16", "f32", *SCALED_KV_TYPES))]
    for device, kv_dtype in kept:
        setup = replace(_SETUP, kv_dtype=kv_dtype)
        with open_executor(GGUFFile.open(file.path), _device(device), setup, _SIZES) as executor:
            made = fingerprint_of(file, executor.config, tokenizer, executor.pool, "ab" * 16, _device(device))
            digests.add(made.digest())
            sizes[kv_dtype] = executor.pool.block_bytes
    assert len(digests) == len(kept)
    assert sizes["int8"] == sizes["fp8"] < sizes["bf16"]


def test_what_cannot_run_is_refused_in_one_line(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", TinyModel(head_dim=32))
    with pytest.raises(UsageError, match="choose cpu, cuda, cuda:N or torch:cpu"):
        DeviceName.parse("metal")
    with (
        pytest.raises(UsageError, match="K/V type q8_0 is not kept on torch:cpu"),
        open_executor(GGUFFile.open(path), _device("torch:cpu"), PoolSetup(4, 16, "q8_0"), _SIZES),
    ):
        pass
    for kv_dtype in SCALED_KV_TYPES:
        refusal = f"K/V type {kv_dtype} is not kept on cpu: choose one of f16, bf16, f32, q8_0, q4_0"
        with (
            pytest.raises(UsageError, match=refusal),
            open_executor(GGUFFile.open(path), _device("cpu"), PoolSetup(4, 16, kv_dtype), _SIZES),
        ):
            pass
    model = TorchModel(GGUFFile.open(path), _device("torch:cpu"), 160)
    _, cache = new_pool(model, _SETUP, _SIZES)
    with pytest.raises(ValueError, match=r"the CUDA kernels cannot run this model: head_dim 32"):
        KernelAttention(cache, ShimLauncher(), lambda: 0)


def test_attention_finds_the_keys_of_a_shared_prefix_in_the_window_of_their_layer(tmp_path: Path) -> None:
    model = TorchModel(GGUFFile.open(write_model(tmp_path / "m.gguf", TinyModel())), _device("torch:cpu"), 160)
    device, tape, found = AskedDevice(window_bytes=1 << 20), _Tape(), []
    tables = [np.array(table, np.int32) for table in ([3, 4, 9], [3, 4, 7], [3, 8, 6])]
    for recorder in (None, tape):
        pool, cache = new_pool(model, _SETUP, _SIZES)
        window = PrefixWindow(device, pool.block_bytes) if recorder else None
        attention = KernelAttention(cache, ShimLauncher(), lambda: 7, window)
        with TorchExecutor(model, pool, attention, _SIZES, recorder) as executor:
            executor.forward([SequenceSlice(_tokens(32), 0, tables[0], "none")])
            executor.forward([SequenceSlice(_tokens(16, 2), 16, tables[2], "none")])
            steps = [(0, 1), (0, 1), (0, 2), (0, 1)]
            found.append([])
            for position, pair in enumerate(steps, 32):
                slices = [SequenceSlice(_tokens(1, position + n), position, tables[n]) for n in pair]
                found[-1].append(executor.forward(slices))
            spans = [
                {
                    (pool.plane_addresses(layer)[0] + 3 * pool.block_bytes, blocks * pool.block_bytes)
                    for layer in range(2)
                }
                for blocks in (1, 2)
            ]
    np.testing.assert_array_equal(found[1], found[0])
    assert {stream for _, stream in device.asked} == {7}
    assert {(each.address, each.nbytes) for each, _ in device.asked if each} == spans[0] | spans[1]
    assert (tape.recorded, tape.replayed) == (1, 2), "a step with another window is of another kind"
