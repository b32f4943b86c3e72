"""Every executor keeps its contract, on tiny random models: the same tests for ggml, for torch, and for torch with our
CUDA kernels, compiled for the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine.executors import PoolSetup, StepExecutor, StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import SequenceSlice
from tests.reference.examples import quick_are
from tests.reference.executors import GGML, KERNELS, TORCH, TriedExecutor
from tests.reference.make_gguf import TinyModel, write_model
from tests.reference.plain_model import PlainModel
from tests.reference.prefill import prefill

TokenArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
_BLOCKS = 96
_SIZES, _SETUP = StepSizes(threads=1), PoolSetup(_BLOCKS, 16, "f16")
_SHAPE = TinyModel(layers=3, width=96, heads=6, kv_heads=2, head_dim=64, feed_forward=160)
_WINDOW, _NARROW = {"llama.attention.sliding_window": 50}, {"llama.attention.sliding_window": 24}
_MODELS = {
    "f16": _SHAPE,
    "q8_0": replace(_SHAPE, quantisation="q8_0"),
    "q4_0": replace(_SHAPE, quantisation="q4_0"),
    "windowed": replace(_SHAPE, architecture="gemma2", quantisation="q8_0", metadata=_WINDOW),
}
_ARCHITECTURES = {
    "llama": replace(_SHAPE, rope_factors=True, biases=("attn_q", "attn_output", "ffn_gate")),
    "mistral": replace(_SHAPE, metadata=_WINDOW),
    "coarse": replace(_SHAPE, metadata={"llama.attention.layer_norm_rms_epsilon": 0.5}),
    "qwen2": replace(_SHAPE, architecture="qwen2", tied=True),
    "qwen3": replace(_SHAPE, architecture="qwen3"),
    "gemma2": replace(_SHAPE, architecture="gemma2", metadata={**_WINDOW, "llama.attn_logit_softcapping": 3.0}),
    "gemma3": replace(_SHAPE, architecture="gemma3", layers=7, metadata={**_WINDOW, "llama.rope.freq_base": 1e6}),
    "phi3": replace(_SHAPE, architecture="phi3", kv_heads=6),
}
_SMALL = replace(_SHAPE, layers=2)
# Forms of attention: of the heads, a block's tokens, and the type of K and V.
_ATTENTIONS = {
    "alone-64": (replace(_SMALL, heads=2, kv_heads=2), 8, "int8"),
    "shared-128": (replace(_SMALL, heads=8, kv_heads=1, head_dim=128), 32, "fp8"),
    "windowed-80": (
        replace(_SMALL, architecture="gemma3", heads=5, kv_heads=1, head_dim=80, metadata=_NARROW),
        64,
        "bf16",
    ),
    "capped-256": (
        replace(
            _SMALL,
            architecture="gemma2",
            heads=4,
            kv_heads=1,
            head_dim=256,
            metadata={**_NARROW, "llama.attn_logit_softcapping": 3.0},
        ),
        128,
        "bf16",
    ),
}


def _cases(
    *, ggml: Sequence[str], torch: Sequence[str], kernels: Sequence[str], quick: Sequence[str] | None = None
) -> list[object]:
    """Each executor with its models, all of them or those named `quick` quickly; our kernels take long on a host."""
    return [
        pytest.param(
            (tried, name),
            id=f"{tried}-{name}",
            marks=(pytest.mark.slow,) if tried is KERNELS or name not in (quick or names) else (),
        )
        for tried, names in ((GGML, ggml), (TORCH, torch), (KERNELS, kernels))
        for name in names
    ]


@dataclass(frozen=True)
class Opened:
    """An executor over a pool of `_BLOCKS` blocks."""

    tried: TriedExecutor
    shape: TinyModel
    executor: StepExecutor

    def assert_as_computed(self, seen: FloatArray, wanted: FloatArray) -> None:
        """Assert that the same rows, computed in other steps, have the same bits, or differ by rounding alone."""
        if self.tried.is_exact:
            np.testing.assert_array_equal(seen, wanted)
        else:
            assert _off(seen, wanted) <= 2 * self.tried.rounding

    def assert_as_alone(self, seen: FloatArray, wanted: FloatArray) -> None:
        """Assert that a single row equals itself beside others. ggml multiplies a single row of f16 with another
        kernel.
        """
        if self.tried is GGML and self.shape.quantisation == "f16":
            np.testing.assert_allclose(seen, wanted, atol=0.02)
        else:
            self.assert_as_computed(seen, wanted)


def _off(seen: npt.NDArray[np.floating], wanted: npt.NDArray[np.floating]) -> float:
    """The greatest root mean square of a row's differences, of the spread of `wanted`."""
    differences = np.square(seen.astype(np.float64) - wanted)
    return float(np.sqrt(differences.reshape(-1, seen.shape[-1]).mean(1)).max() / wanted.std())


@pytest.fixture(scope="module", params=_cases(ggml=[*_MODELS], torch=["f16", "windowed"], kernels=["windowed"]))
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    tried, name = request.param
    tried.need()
    path = write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", _MODELS[name])
    with tried.opens(path, _SETUP, _SIZES) as executor:
        yield Opened(tried, _MODELS[name], executor)


def _tokens(count: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).integers(0, _SHAPE.vocabulary, count).astype(np.int32)


def _table(count: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).permutation(_BLOCKS)[: -(-count // 16)].astype(np.int32)


def _tables(*counts: int, setup: PoolSetup = _SETUP) -> list[TokenArray]:
    """Tables without a block in common."""
    sizes = [-(-count // setup.block_tokens) for count in counts]
    order = np.random.default_rng(11).permutation(setup.blocks)[: sum(sizes)].astype(np.int32)
    return np.split(order, np.cumsum(sizes)[:-1])


def _greedy(executor: StepExecutor, logits: FloatArray, start: int, table: TokenArray, steps: int) -> list[int]:
    chosen = []
    for step in range(steps):
        chosen.append(int(logits.argmax()))
        logits = executor.forward([SequenceSlice(np.array(chosen[-1:], np.int32), start + step, table)])[0]
    return chosen


# Of three sequences, the tokens that each step has: prompts alone, a prompt beside an answer, answers.
_STEPS = [(48, 33, 0), (40, 1, 5), (7, 1, 1), (1, 1, 1), (1, 0, 1), (1, 1, 1)]


@pytest.mark.parametrize(
    "case",
    _cases(
        ggml=[*_ARCHITECTURES],
        torch=[*_ARCHITECTURES],
        kernels=["coarse", "gemma2", "gemma3"],
        quick=["llama", "coarse", "gemma2", "phi3"],
    ),
)
def test_logits_are_those_of_double_precision(tmp_path: Path, case: tuple[TriedExecutor, str]) -> None:
    tried, name = case
    tried.need()
    _assert_plain(tmp_path, tried, _ARCHITECTURES[name], _SETUP, _STEPS, tried.rounding)


@pytest.mark.parametrize("case", _cases(ggml=["f16", "q8_0", "windowed"], torch=["f16", "windowed"], kernels=["f16"]))
def test_rows_past_the_last_token_stand_for_none(tmp_path: Path, case: tuple[TriedExecutor, str]) -> None:
    tried, name = case
    tried.need()
    whole, tokens = _MODELS[name], _tokens(40) % 280
    with GGUFFile.open(write_model(tmp_path / "tokens.gguf", whole)) as file:
        spelt = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(spelt, list)
    padded = replace(whole, metadata={**whole.metadata, "tokenizer.ggml.tokens": spelt[:280]})
    found, likeliest = [], []
    for at, shape in enumerate((whole, padded)):
        with tried.opens(write_model(tmp_path / f"{at}.gguf", shape), _SETUP, _SIZES) as executor:
            pieces = [SequenceSlice(tokens, 0, _table(40), "all")]
            found.append(executor.forward(pieces).copy())
            likeliest.append(executor.step(pieces).likeliest(range(40))[0])
            assert executor.limits.vocabulary == found[-1].shape[1]
            if shape is padded:
                with pytest.raises(ValueError, match="token ids"):
                    executor.forward([SequenceSlice(np.array([280], np.int32), 0, _table(1))])
    np.testing.assert_array_equal(found[1], found[0][:, :280])
    assert likeliest == [rows.argmax(1).tolist() for rows in found]


@pytest.mark.parametrize("case", _cases(ggml=[], torch=[*_ATTENTIONS], kernels=[*_ATTENTIONS]))
def test_every_form_of_attention_gives_the_logits_of_double_precision(
    tmp_path: Path, case: tuple[TriedExecutor, str]
) -> None:
    """Sizes of heads, groups that share K and V, sizes of blocks and types of K and V: the first sequence has two
    blocks."""
    tried, name = case
    tried.need()
    shape, block_tokens, kv_dtype = _ATTENTIONS[name]
    steps = [(block_tokens - 1, 5), (2, 1), (1, 1)]
    bound = tried.rounding + tried.kv_noise[kv_dtype]
    _assert_plain(tmp_path, tried, shape, PoolSetup(4, block_tokens, kv_dtype), steps, bound)


def _assert_plain(
    folder: Path, tried: TriedExecutor, shape: TinyModel, setup: PoolSetup, steps: Sequence[Sequence[int]], bound: float
) -> None:
    """Assert plain results of the tokens that each step has of each sequence."""
    path = write_model(folder / "m.gguf", shape)
    plain = PlainModel(path, shape)
    totals = np.sum(steps, 0)
    texts = [_tokens(count, seed) for seed, count in enumerate(totals)]
    tables, wanted = _tables(*totals, setup=setup), [plain.logits(text) for text in texts]
    starts = np.zeros(len(totals), int)
    with tried.opens(path, setup, _SIZES) as executor:
        for step in steps:
            ends, parts = starts + step, [n for n, count in enumerate(step) if count]
            slices = [SequenceSlice(texts[n][starts[n] : ends[n]], int(starts[n]), tables[n], "all") for n in parts]
            expected = np.concatenate([wanted[n][starts[n] : ends[n]] for n in parts])
            assert 0 < _off(executor.forward(slices), expected) < bound, f"in the step of {step}"
            starts = ends


@pytest.mark.parametrize("count", quick_are([1, 63, 64, 65, 200, 331], [True, False, True, True, True, False]))
def test_a_restored_prefix_gives_the_same_bits_and_the_same_text(opened: Opened, count: int) -> None:
    """Cold: compute all. Warm: copy the leading storage blocks' bytes into other blocks, compute the rest."""
    tokens, cold_table, warm_table = _tokens(count), _table(count + 40, 1), _table(count + 40, 2)
    executor, pool = opened.executor, opened.executor.pool
    cold = prefill(executor, tokens, 0, cold_table)
    stored = []
    for block in range((count - 1) // 64):
        stored.append(np.empty(pool.payload_bytes(4), np.uint8))
        pool.gather_block(cold_table[4 * block : 4 * block + 4], stored[-1])
    text = _greedy(executor, cold, count, cold_table, 12)
    for restored in {0, len(stored) // 2, len(stored)}:
        pool.planes.fill(0xFF)  # NaN: a row that was not restored would show
        tables = [warm_table[4 * block : 4 * block + 4] for block in range(restored)]
        pool.scatter_blocks(stored[:restored], tables)
        warm = prefill(executor, tokens[64 * restored :], 64 * restored, warm_table)
        if opened.tried.is_exact or restored in (0, len(stored)):  # the steps are those of the cold run
            np.testing.assert_array_equal(warm, cold)
            assert _greedy(executor, warm, count, warm_table, 12) == text
        else:
            opened.assert_as_computed(warm, cold)


def test_blocks_that_were_moved_or_restored_in_part_are_as_good(opened: Opened) -> None:
    tokens, pool = _tokens(129), opened.executor.pool
    first, second = _tables(144, 144)
    prefill(opened.executor, tokens[:128], 0, first)
    last = [SequenceSlice(tokens[128:], 128, first)]
    wanted = opened.executor.forward(last)
    stored = np.empty(pool.payload_bytes(8), np.uint8)
    pool.gather_block(first[:8], stored)
    pool.copy_blocks(first[:3], second[:3])
    pool.planes[:, first] = 0xFF
    pool.scatter_part(stored, 3, second[3:8])
    np.testing.assert_array_equal(opened.executor.forward([replace(last[0], block_table=second)]), wanted)


def test_a_step_writes_its_own_rows_and_nothing_else(opened: Opened) -> None:
    pool, tables = opened.executor.pool, _tables(48, 64, 16)
    written = np.zeros(_BLOCKS * 16, bool)
    pool.planes.fill(0xFF)
    for starts, counts in [((0, 0, 0), (40, 17, 3)), ((40, 17, 3), (1, 1, 1))]:  # the second is padded on a GPU
        slices = []
        for table, start, count in zip(tables, starts, counts, strict=True):
            slices.append(SequenceSlice(_tokens(count, start), start, table))
            positions = np.arange(start, start + count)
            written[table[positions // 16] * 16 + positions % 16] = True
        opened.executor.forward(slices)
        rows = pool.planes.reshape(len(pool.planes), _BLOCKS * 16, -1)
        untouched = (rows == 0xFF).all(2)
        assert (untouched == ~written).all()


def test_logits_do_not_depend_on_chunk_size_or_company(opened: Opened) -> None:
    tokens, table, other = _tokens(256), _table(256, 3), _tokens(64, 9)
    executor = opened.executor
    whole = executor.forward([SequenceSlice(tokens, 0, table, "all")])
    for chunk in (64, 128, 192):
        parts = [
            executor.forward([SequenceSlice(tokens[first : first + chunk], first, table, "all")])
            for first in range(0, 256, chunk)
        ]
        opened.assert_as_computed(np.concatenate(parts), whole)
    tables = np.split(np.random.default_rng(4).permutation(_BLOCKS)[:20].astype(np.int32), [16])
    pair = executor.forward([SequenceSlice(tokens, 0, tables[0], "all"), SequenceSlice(other, 0, tables[1], "last")])
    opened.assert_as_computed(pair[:256], whole)
    opened.assert_as_alone(pair[256:], executor.forward([SequenceSlice(other, 0, table)]))


def test_logits_that_stay_where_they_are_are_the_same(opened: Opened) -> None:
    executor, tables = opened.executor, _tables(40, 20, 30)
    wanted = zip((40, 20, 30), tables, ("last", "none", "all"), strict=True)
    prompts = [SequenceSlice(_tokens(count - 2, count), 0, table, outputs) for count, table, outputs in wanted]
    decodes = [
        SequenceSlice(_tokens(1, count), count - 2, table) for count, table in zip((40, 20), tables, strict=False)
    ]
    for _ in range(3):  # a GPU records the second step of a kind, and replays the third
        for slices, outputs in ((prompts, 29), (decodes, 2), (prompts[1:2], 0)):
            whole, logits = executor.forward(slices).copy(), executor.step(slices)
            assert whole.shape == (outputs, _SHAPE.vocabulary)
            some = [*range(outputs)][::-2]
            tokens, values = logits.likeliest(some)
            assert tokens == whole.argmax(1)[some].tolist()
            np.testing.assert_array_equal(np.array(values, np.float32), whole.max(1, initial=-np.inf)[some])
            for rows in [some, range(outputs)] if outputs else []:
                np.testing.assert_array_equal(logits.rows(rows), whole[rows])


def test_sequences_may_share_leading_blocks(opened: Opened) -> None:
    executor, common = opened.executor, _tokens(96)
    first, second = _tables(128, 128)
    executor.forward([SequenceSlice(common, 0, first, "none")])
    second[:6] = first[:6]
    tails = [_tokens(20, 1), _tokens(20, 2)]
    both = executor.forward(
        [SequenceSlice(tail, 96, table) for tail, table in zip(tails, (first, second), strict=True)]
    )
    for tail, row, table in zip(tails, both, _tables(0, 0, 128, 128)[2:], strict=True):
        executor.forward([SequenceSlice(common, 0, table, "none")])
        opened.assert_as_alone(row[None], executor.forward([SequenceSlice(tail, 96, table)]))


def test_outputs_are_those_that_were_asked_for(opened: Opened) -> None:
    executor, tokens, table = opened.executor, _tokens(32), _table(32)
    every = executor.forward([SequenceSlice(tokens, 0, table, "all")])
    assert every.shape == (32, _SHAPE.vocabulary) and np.isfinite(every).all()
    opened.assert_as_alone(executor.forward([SequenceSlice(tokens, 0, table)]), every[-1:])
    assert executor.forward([SequenceSlice(tokens, 0, table, "none")]).shape == (0, _SHAPE.vocabulary)
    again = executor.forward([SequenceSlice(tokens[16:], 16, table, "all")])
    opened.assert_as_computed(again, every[16:])
    place = np.full((40, _SHAPE.vocabulary), np.nan, np.float32)
    placed = executor.forward([SequenceSlice(tokens, 0, table, "all")], place)
    assert placed.base is place or placed.base is place.base
    np.testing.assert_array_equal(place[:32], every)
    assert np.isnan(place[32:]).all()


@pytest.mark.parametrize(
    ("tokens", "start", "table", "reason"),
    [
        ([], 0, [0], "at least one token"),
        ([5], -1, [0], "start"),
        ([320], 0, [0], "token ids"),
        ([-1], 0, [0], "token ids"),
        ([1] * 17, 0, [0], "block table"),
        ([1], 0, [_BLOCKS], "block ids"),
        ([1], 8192, [0] * 600, "context"),
        ([1] * 513, 0, list(range(40)), "at most 512"),
    ],
)
def test_requests_that_would_corrupt_memory_are_refused(
    opened: Opened, tokens: list[int], start: int, table: list[int], reason: str
) -> None:
    pool = opened.executor.pool
    pool.planes.fill(0xFF)
    with pytest.raises(ValueError, match=reason):
        opened.executor.forward([SequenceSlice(np.array(tokens, np.int32), start, np.array(table, np.int32))])
    assert (pool.planes == 0xFF).all()


def test_two_sequences_may_not_write_the_same_slot(opened: Opened) -> None:
    piece = SequenceSlice(_tokens(8), 0, _table(16))
    with pytest.raises(ValueError, match="same place"):
        opened.executor.forward([piece, piece])


_KV_TYPES = [
    pytest.param(tried, kv_dtype, id=f"{tried}-{kv_dtype}", marks=[pytest.mark.slow] if tried is KERNELS else [])
    for tried in (GGML, TORCH, KERNELS)
    for kv_dtype in tried.kv_noise
]


@pytest.mark.parametrize(("tried", "kv_dtype"), _KV_TYPES)
def test_each_kv_type_restores_to_the_same_bits_and_costs_no_more_than_its_rounding(
    tmp_path: Path, tried: TriedExecutor, kv_dtype: str
) -> None:
    """The rows that are written are read: against f32, and a restored prefix against a computed one."""
    tried.need()
    path, tokens = write_model(tmp_path / "m.gguf", _SHAPE), _tokens(150)
    with tried.opens(path, PoolSetup(_BLOCKS, 16, "f32"), _SIZES) as executor:
        exact = prefill(executor, tokens, 0, _table(150, 1))
    with tried.opens(path, PoolSetup(_BLOCKS, 16, kv_dtype), replace(_SIZES, threads=2)) as executor:
        pool, cold_table, warm_table = executor.pool, _table(150, 1), _table(150, 2)
        cold = prefill(executor, tokens, 0, cold_table)
        stored = [np.empty(pool.payload_bytes(4), np.uint8) for _ in range(2)]
        for block, payload in enumerate(stored):
            pool.gather_block(cold_table[4 * block : 4 * block + 4], payload)
        pool.planes.fill(0xFF)
        pool.scatter_blocks(stored, [warm_table[:4], warm_table[4:8]])
        warm = prefill(executor, tokens[128:], 128, warm_table)
    np.testing.assert_array_equal(warm, cold)
    assert 0 < np.abs(cold - exact).max() < tried.kv_noise[kv_dtype] * 4 * exact.std()


@pytest.mark.parametrize("tried", [GGML, TORCH], ids=str)
def test_a_closed_executor_refuses_work(tmp_path: Path, tried: TriedExecutor) -> None:
    tried.need()
    path = write_model(tmp_path / "m.gguf", _SHAPE)
    with tried.opens(path, PoolSetup(4, 16, "f16"), _SIZES) as executor:
        executor.close()
        executor.close()
        with pytest.raises(RuntimeError, match="closed"):
            executor.forward([SequenceSlice(_tokens(1), 0, np.zeros(1, np.int32))])
