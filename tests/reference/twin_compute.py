"""A model without weights that needs its K/V like a real one: what the engine's scheduling is checked against.

Each token's K/V row is a number made of the token, its position and *all rows before it, as they are in the pool*; the
logits are made of the sum of all rows. So a wrong table, a lost, stale or overwritten block, or a row that was never
computed, changes every later token of the answer, while `answer_alone` says without any pool what it should have been.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvstore_engine.executors.logits import HostLogits, StepLogits
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.graph.step import StepLimits, plan_step
from kvstore_engine.kernels import select_kernels
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.rope import RopeConfig
from kvstore_engine.pool import BlockPool
from kvstore_engine.tokenizer.tokenizer import StreamingDetokenizer

VOCABULARY = 64
_MASK = (1 << 64) - 1
_CONFIG = ModelConfig(
    "twin",
    "llama",
    1,
    8,
    8,
    1,
    1,
    8,
    1e-5,
    1 << 20,
    VOCABULARY,
    True,
    RopeConfig(8, 1e4, 1.0, 512, 0.0, 1.0, 32.0, 1.0),
)
_WEIGHTS = np.random.default_rng(7).integers(1, 1 << 63, VOCABULARY, np.uint64) | np.uint64(1)
_PLACES = np.random.default_rng(8).integers(1, 1 << 63, 8192, np.uint64) | np.uint64(1)


def twin_config() -> ModelConfig:
    """Return the model of `twin_pool`: one layer with 16 bytes of K (and of V) a token."""
    return _CONFIG


def twin_pool(blocks: int, block_tokens: int = 16, window: tuple[int, int] = (0, 0)) -> BlockPool:
    """A pool of one layer with 16 bytes of K (and of V) a token, full of garbage. `window`: tokens that a second layer
    sees, which has as many blocks of its own.
    """
    tokens, own = window
    config = replace(_CONFIG, layers=2, windows=(0, tokens)) if tokens else _CONFIG
    kernels = select_kernels("reference")
    pool = BlockPool(config, blocks, block_tokens=block_tokens, kernels=kernels, window_blocks=own)
    pool.planes.fill(0xA5)
    if pool.window is not None:
        pool.window.planes.fill(0xA5)
    return pool


def answer_alone(prompt: Sequence[int], count: int, end_ids: frozenset[int] = frozenset()) -> list[int]:
    """The greedy answer, without any pool."""
    total, tokens = 0, []
    for position, token in enumerate(prompt):
        total = _add(total, _row(token, position, total), position)
    while len(tokens) < count:
        token = int(_logits(total).argmax())
        if token in end_ids:
            break
        tokens.append(token)
        position = len(prompt) + len(tokens) - 1
        total = _add(total, _row(token, position, total), position)
    return tokens


@dataclass
class TwinCompute:
    """Computes over `pool`. `on_step(slices)` may raise, count, or move a clock."""

    pool: BlockPool
    max_tokens: int = 256
    max_sequences: int = 16
    max_context: int = 4096
    on_step: Callable[[Sequence[SequenceSlice]], None] = lambda slices: None
    computed_tokens: int = 0
    steps: int = 0
    threads: int = 1
    longest_step_tokens: int = field(default=0)

    @property
    def limits(self) -> StepLimits:
        return StepLimits(
            VOCABULARY,
            self.pool.blocks,
            self.pool.block_tokens,
            self.max_tokens,
            self.max_sequences,
            self.max_context,
            0 if self.pool.window is None else self.pool.window.blocks,
        )

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None) -> StepLogits:
        return HostLogits(self.forward(slices))

    def forward(self, slices: Sequence[SequenceSlice]) -> npt.NDArray[np.float32]:
        inputs = plan_step(slices, self.limits)
        self.on_step(slices)
        rows = self.pool.planes[0].reshape(-1, 16).view(np.uint64)
        values = self.pool.planes[1].reshape(-1, 16).view(np.uint64)
        outputs = []
        for piece in slices:
            count, size = piece.start + len(piece.tokens), self.pool.block_tokens
            slots = np.asarray(piece.block_table, np.int64)[np.arange(count) // size] * size + np.arange(count) % size
            before = rows[slots[: piece.start], 0]
            assert (before == values[slots[: piece.start], 1]).all(), "K and V of a row belong together"
            window = self._window(piece, rows, slots)
            total = int((before * _PLACES[: piece.start]).sum(dtype=np.uint64))
            for position, token in enumerate(piece.tokens.tolist(), piece.start):
                row = _row(token, position, total)
                rows[slots[position]] = row, position
                values[slots[position]] = position, row
                if window is not None:
                    place = int(np.asarray(piece.window_table)[position // size]) * size + position % size
                    window[place] = row, position
                total = _add(total, row, position)
            if piece.outputs == "last":
                outputs.append(_logits(total))
        self.steps += 1
        self.computed_tokens += len(inputs.tokens)
        self.longest_step_tokens = max(self.longest_step_tokens, len(inputs.tokens))
        return np.array(outputs, np.float32).reshape(-1, VOCABULARY)

    def _window(
        self, piece: SequenceSlice, rows: npt.NDArray[np.uint64], slots: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint64] | None:
        """Return the rows of the layer with a window, after a check of the rows that the slice's first token sees."""
        own, size = self.pool.window, self.pool.block_tokens
        if own is None:
            return None
        window = own.planes[0].reshape(-1, 16).view(np.uint64)
        seen = np.arange(max(0, piece.start - self.pool.window_tokens + 1), piece.start)
        places = np.asarray(piece.window_table, np.int64)[seen // size] * size + seen % size
        assert (window[places, 0] == rows[slots[seen], 0]).all(), "a window of another text"
        return window


class TwinTokenizer:
    """A token is a letter; `end_ids` end an answer."""

    def __init__(self, end_ids: frozenset[int] = frozenset()) -> None:
        self.end_ids = end_ids

    def stream(self, special: bool = False, continues: bool = False) -> StreamingDetokenizer:
        return StreamingDetokenizer(letter)


def letter(token: int) -> bytes:
    """The text of a token."""
    return b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ."[token : token + 1]


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(map(letter, tokens)).decode()


class StepClock:
    """A clock that only steps move. Seconds of a step: `fixed_s`, and more by its rows and what they attend to."""

    def __init__(self, fixed_s: float = 0.004, row_s: float = 0.001, attended_s: float = 1e-7) -> None:
        self.now = 0.0
        self._costs = fixed_s, row_s, attended_s

    def __call__(self) -> float:
        return self.now

    def step(self, slices: Sequence[SequenceSlice]) -> None:
        """For `TwinCompute.on_step`."""
        fixed_s, row_s, attended_s = self._costs
        self.now += fixed_s
        for piece in slices:
            count = len(piece.tokens)
            self.now += count * row_s + count * (piece.start + count / 2) * attended_s


def _row(token: int, position: int, total: int) -> int:
    mixed = (token * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + total * 0x165667B19E3779F9 + 1) & _MASK
    mixed ^= mixed >> 29
    return mixed * 0xBF58476D1CE4E5B9 & _MASK


def _add(total: int, row: int, position: int) -> int:
    return (total + row * int(_PLACES[position])) & _MASK


def _logits(total: int) -> npt.NDArray[np.float32]:
    mixed = np.uint64(total | 1) * _WEIGHTS
    logits: npt.NDArray[np.float32] = (mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 22)
    return logits
