"""llama.cpp's own decode, several sequences in one context, through the library that also gives the engine its ggml.

The module owns a `llama_*` model and context. The parameter structs grow with every release, so defaults are read into
an oversized blob, the few fields to set are found by the pattern of their known defaults, and the effect is read back
from llama.cpp's getters and its log. Anything unexpected raises; nothing is guessed. It never shares a process with the
engine (one ggml a process): `children` starts it in one of its own.
"""

from __future__ import annotations

import ctypes as ct
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_engine.bench.workload import Int32Array
from kvstore_engine.errors import OperationError
from kvstore_engine.ggml.library import find_library

_LOG = ct.CFUNCTYPE(None, ct.c_int, ct.c_char_p, ct.c_void_p)
_PAST_DRIFT_BYTES = 512  # more than any parameter struct takes
_FIRST_WORDS = (512, 2048, 512, 1)  # n_ctx, n_batch, n_ubatch, n_seq_max
_SWITCHES = bytes((0, 1, 1, 1, 1, 0))  # embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified
_NO_LOGITS, _LOGITS = 0, 1
_SINKS: list[object] = []  # llama.cpp calls the last one at any time, also after its context is gone


class LlamaError(OperationError):
    """An error: llama.cpp failed, or its structures have an unknown layout, so that it cannot be measured."""


class _Blob(ct.Structure):
    """A parameter struct of unknown length. By value it is a copy on the stack, where extra bytes do no harm."""

    _fields_ = (("raw", ct.c_uint8 * _PAST_DRIFT_BYTES),)


class _Batch(ct.Structure):
    """`struct llama_batch`, unchanged since 2024."""

    _fields_ = (
        ("n_tokens", ct.c_int32),
        ("token", ct.POINTER(ct.c_int32)),
        ("embd", ct.c_void_p),
        ("pos", ct.POINTER(ct.c_int32)),
        ("n_seq_id", ct.POINTER(ct.c_int32)),
        ("seq_id", ct.POINTER(ct.POINTER(ct.c_int32))),
        ("logits", ct.POINTER(ct.c_int8)),
    )


@dataclass(frozen=True, slots=True)
class LlamaContextSettings:
    """The settings of a llama.cpp context, which holds the K/V of sequences. With `unified` all sequences share one K/V
    buffer of `context` tokens; otherwise each has a buffer of `context / sequences` tokens.
    """

    context: int
    sequences: int
    threads: int
    flash: bool
    unified: bool
    batch: int = 2048
    ubatch: int = 512


class LlamaContext:
    """A model loaded by llama.cpp with a context for `settings.sequences` sequences."""

    def __init__(self, model: Path, settings: LlamaContextSettings) -> None:
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        self.settings = settings
        self._log: list[str] = []
        self._llama = ct.CDLL(str(llama_library(find_library())), mode=ct.RTLD_LOCAL)
        self._sink = _LOG(lambda level, text, _: self._log.append(text.decode(errors="replace")))
        _SINKS.append(self._sink)
        self._function("llama_log_set", None, _LOG, ct.c_void_p)(self._sink, None)
        self._function("llama_backend_init", None)()
        parameters = self._function("llama_model_default_params", _Blob)()
        load = self._function("llama_model_load_from_file", ct.c_void_p, ct.c_char_p, _Blob)
        self._model = self._alive(load(str(model).encode(), parameters), "load the model")
        self._context = self._new_context()
        vocabulary = self._function("llama_model_get_vocab", ct.c_void_p, ct.c_void_p)(self._model)
        self.vocabulary = int(self._function("llama_vocab_n_tokens", ct.c_int32, ct.c_void_p)(vocabulary))
        new_batch = self._function("llama_batch_init", _Batch, ct.c_int32, ct.c_int32, ct.c_int32)
        self._batch = new_batch(settings.batch, 0, 1)
        for index in range(settings.batch):
            self._batch.n_seq_id[index] = 1
        self._fields = _batch_arrays(self._batch, settings.batch)
        self._decode = self._function("llama_decode", ct.c_int32, ct.c_void_p, _Batch)
        self._row = self._function("llama_get_logits_ith", ct.POINTER(ct.c_float), ct.c_void_p, ct.c_int32)

    def close(self) -> None:
        """Free the context and the model. A second call does nothing."""
        if self._context:
            self._function("llama_batch_free", None, _Batch)(self._batch)
            self._function("llama_free", None, ct.c_void_p)(self._context)
            self._function("llama_model_free", None, ct.c_void_p)(self._model)
            self._context = 0

    def prefill(self, sequence: int, tokens: Int32Array) -> int:
        """Compute the prompt `tokens` for sequence number `sequence` with llama.cpp, and return the likeliest next
        token.
        """
        size = min(self.settings.batch, self.settings.context)
        for first in range(0, len(tokens), size):
            part = tokens[first : first + size]
            positions = np.arange(first, first + len(part), dtype=np.int32)
            last = first + len(part) == len(tokens)
            self._run(part, positions, np.full(len(part), sequence, np.int32), logits_from=len(part) - last)
        return self._best(len(part) - 1)

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Compute one token for each of the first `len(tokens)` sequences, and return the likeliest next token of each.
        `positions` are the positions of the tokens in their sequences.
        """
        count = len(tokens)
        sequences = np.arange(count, dtype=np.int32)
        self._run(np.array(tokens, np.int32), np.array(positions, np.int32), sequences, logits_from=0)
        return [self._best(index) for index in range(count)]

    def _run(self, tokens: Int32Array, positions: Int32Array, sequences: Int32Array, *, logits_from: int) -> None:
        count, fields = len(tokens), self._fields
        self._batch.n_tokens = count
        fields.tokens[:count], fields.positions[:count] = tokens, positions
        fields.logits[:count] = _NO_LOGITS
        fields.logits[logits_from:count] = _LOGITS
        for index, sequence in enumerate(sequences.tolist()):
            self._batch.seq_id[index][0] = sequence
        if status := self._decode(self._context, self._batch):
            raise LlamaError(f"llama_decode failed with status {status}")

    def _best(self, index: int) -> int:
        row = np.ctypeslib.as_array(self._row(self._context, index), (self.vocabulary,))
        return int(row.argmax())

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        try:
            function = getattr(self._llama, name)
        except AttributeError:
            raise LlamaError(f"{find_library()} has no {name}: it is a ggml without llama.cpp") from None
        function.restype, function.argtypes = result, list(arguments)
        return function

    def _alive(self, pointer: int | None, what: str) -> int:
        if not pointer:
            raise LlamaError(f"llama.cpp could not {what}: {' '.join(self._log[-3:]).strip()}")
        return pointer

    def _new_context(self) -> int:
        wanted = self.settings
        parameters = self._function("llama_context_default_params", _Blob)()
        _set_fields(parameters, wanted)
        new = self._function("llama_init_from_model", ct.c_void_p, ct.c_void_p, _Blob)
        pointer = self._alive(new(self._model, parameters), "create a context")
        for name, number in (
            ("llama_n_batch", min(wanted.batch, wanted.context)),
            ("llama_n_seq_max", wanted.sequences),
            ("llama_n_threads", wanted.threads),
            ("llama_n_threads_batch", wanted.threads),
        ):
            seen = self._function(name, ct.c_int32, ct.c_void_p)(pointer)
            if seen != number:
                raise LlamaError(f"{name} is {seen}, {number} was set: its parameters are laid out otherwise")
        for name, words, switch in (
            ("flash_attn", ("disabled", "enabled"), wanted.flash),
            ("kv_unified", ("false", "true"), wanted.unified),
        ):
            said = re.search(rf"{name}\s*=\s*(\w+)", "".join(self._log))
            if said is None or said[1] != words[switch]:
                raise LlamaError(f"{name}: {words[switch]} was set, llama.cpp says {said[1] if said else 'nothing'}")
        return pointer


def llama_library(ggml: Path) -> Path:
    """Return the path of the library that contains llama.cpp. `ggml` is the path of the ggml library that belongs to
    it.
    """
    folder = ggml if ggml.is_dir() else ggml.parent
    beside = sorted(folder.glob("libllama.so*")) + sorted(folder.glob("libllama.dylib"))
    return beside[0] if beside else ggml


@dataclass(frozen=True, slots=True)
class _Fields:
    """The batch's columns as arrays: assigned at once, not element by element."""

    tokens: Int32Array
    positions: Int32Array
    logits: npt.NDArray[np.int8]


def _batch_arrays(batch: _Batch, size: int) -> _Fields:
    return _Fields(
        np.ctypeslib.as_array(batch.token, (size,)),
        np.ctypeslib.as_array(batch.pos, (size,)),
        np.ctypeslib.as_array(batch.logits, (size,)),
    )


def _set_fields(parameters: _Blob, wanted: LlamaContextSettings) -> None:
    """Set counts, flash_attn_type and kv_unified, at places found by their defaults."""
    raw = bytearray(bytes(parameters.raw))
    words = struct.unpack_from(f"<{len(raw) // 4}i", raw)
    switches = raw.find(_SWITCHES)
    threads = next((i for i in range(4, 16) if words[i : i + 2] == (4, 4)), None)
    if words[:4] != _FIRST_WORDS or switches < 0 or threads is None:
        raise LlamaError("llama_context_params is laid out in an unknown way: this llama.cpp is not supported")
    enums = next((i for i in range(threads, 24) if words[i : i + 4] == (-1, -1, -1, -1)), None)
    if enums is None:
        raise LlamaError("llama_context_params is laid out in an unknown way: this llama.cpp is not supported")
    struct.pack_into("<4i", raw, 0, wanted.context, wanted.batch, wanted.ubatch, wanted.sequences)
    struct.pack_into("<2i", raw, 4 * threads, wanted.threads, wanted.threads)
    struct.pack_into("<i", raw, 4 * (enums + 3), int(wanted.flash))  # rope, pooling, attention, flash
    raw[switches + len(_SWITCHES) - 1] = wanted.unified
    ct.memmove(parameters.raw, bytes(raw), len(raw))
