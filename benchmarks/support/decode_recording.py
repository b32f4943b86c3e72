"""Records what attention reads while a real model decodes: each token's queries, and K and V of the whole context.

The engine computes it from documents of this repository, with all of attention; its kernels are wrapped so that each
decode step's queries are kept.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.kernels import Kernels, select_kernels
from kvstore_engine.kernels.base import Bytes, Int32Array
from kvstore_engine.kernels.foreign import array_at, pointer_at
from kvstore_engine.kernels.layout import KernelStep, Layer
from kvstore_engine.model.weights import load_model
from kvstore_engine.models.locate import locate
from kvstore_engine.pool import BlockPool
from kvstore_engine.tokenizer import Tokenizer
from support.engine import THREADS

MODEL = "smollm2-135m-instruct:q8_0"
DOCUMENTS = Path(__file__).parents[2] / "docs"
OPERATION = ct.CFUNCTYPE(None, ct.c_void_p, ct.c_int, ct.c_int, ct.c_void_p)
_STEP_TOKENS = 512
Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]


class RecordingKernels(Kernels):
    """The engine's own kernels, which also keep the queries of steps of one row, a layer after the other."""

    name = "recording"

    def __init__(self, inner: Kernels) -> None:
        self._inner, self._attend = inner, OPERATION(inner.attention_address)
        self._callback = OPERATION(self._recorded)
        self.queries: list[Floats] = []

    @property
    def attention_address(self) -> int:
        return ct.cast(self._callback, ct.c_void_p).value or 0

    @property
    def q4_product_address(self) -> int:
        return self._inner.q4_product_address

    @property
    def q8_product_address(self) -> int:
        return self._inner.q8_product_address

    def copy_blocks(
        self, planes: Bytes, payloads: Sequence[Bytes], tables: Int32Array, *, into_pool: bool, threads: int = 1
    ) -> None:
        self._inner.copy_blocks(planes, payloads, tables, into_pool=into_pool, threads=threads)

    def move_blocks(self, planes: Bytes, sources: Int32Array, targets: Int32Array, *, threads: int = 1) -> None:
        self._inner.move_blocks(planes, sources, targets, threads=threads)

    def _recorded(self, destination: int, thread: int, threads: int, userdata: int) -> None:
        step = KernelStep.from_address(Layer.from_address(userdata).step)
        rows = array_at(step.sequences, np.int32, 4)[1]
        if thread == 0 and rows == 1:
            data = pointer_at(pointer_at(destination + step.source_offset) + step.data_offset)
            self.queries.append(array_at(data, np.float32, step.query_heads, step.head_dim).copy())
        self._attend(destination, thread, threads, userdata)


@dataclass(frozen=True)
class Recording:
    """A decode of `queries.shape[0]` tokens after a prompt of `prompt_tokens`. keys, values: [layers, tokens, kv_heads,
    head_dim]; queries: [steps, layers, heads, head_dim]. A layer has `weight_bytes` of weights.
    """

    prompt_tokens: int
    weight_bytes: int
    keys: Halves
    values: Halves
    queries: Floats


def recorded(prompt_tokens: int, steps: int) -> Recording:
    """Return the recording of a greedy decode of `steps` tokens after `prompt_tokens` tokens of documents."""
    text = "\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.md")))
    with ExitStack() as stack:
        file = stack.enter_context(GGUFFile.open(locate(MODEL)))
        tokenizer, model = Tokenizer.from_metadata(file.metadata), stack.enter_context(load_model(file))
        prompt = np.array(tokenizer.encode(text[: 8 * prompt_tokens], add_special=True)[:prompt_tokens], np.int32)
        config, kernels = model.config, RecordingKernels(select_kernels())
        pool = BlockPool(config, -(-(prompt_tokens + steps) // 16), kernels=kernels)
        table = np.array(pool.take(range(pool.blocks)), np.int32)
        sizes = StepSizes(THREADS, _STEP_TOKENS, 1, prompt_tokens + steps + 16)
        executor = stack.enter_context(Executor(model, pool, sizes))
        for first in range(0, prompt_tokens, _STEP_TOKENS):
            part = prompt[first : first + _STEP_TOKENS]
            logits = executor.forward([SequenceSlice(part, first, table)])
        kernels.queries.clear()
        for step in range(steps):
            token = np.array([logits[0].argmax()], np.int32)
            logits = executor.forward([SequenceSlice(token, prompt_tokens + step, table)])
        planes = np.asarray(pool.planes).reshape(config.layers, 2, -1).view(np.float16)
        rows = planes.reshape(config.layers, 2, -1, config.kv_heads, config.head_dim)[:, :, : prompt_tokens + steps]
        keys, values = (np.ascontiguousarray(rows[:, which]) for which in (0, 1))
        queries = np.array(kernels.queries).reshape(steps, config.layers, config.heads, config.head_dim)
        weights = sum(file.tensor_bytes(name).nbytes for name in file.tensors if name.startswith("blk."))
        return Recording(prompt_tokens, weights // config.layers, keys, values, queries)
