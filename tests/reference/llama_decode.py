"""llama.cpp itself, as the judge of our logits and of our speed. Run as a child process: one ggml a process.

    python llama_decode.py --model M.gguf --tokens tokens.npy --logits out.npy [--flash] [--threads 2]
    python llama_decode.py --model M.gguf --tokens tokens.npy --time prefill|decode --repeat 3
    python llama_decode.py --jobs jobs.json    # [{"model", "tokens", "logits", "flash", "chunks"}, ...]

Binds `llama_*` from the same shared library that the engine takes ggml from, so that a comparison
compares code and not builds. llama.cpp's parameter structs grow with every release: we take the defaults
as an oversized blob, find the few fields that we set by the pattern of their known defaults, and check
afterwards, by llama.cpp's own getters and log, that they took effect. Anything unexpected stops the run;
nothing is guessed.
"""

import argparse
import ctypes as ct
import itertools
import json
import os
import re
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_engine.ggml import find_library

FloatArray = npt.NDArray[np.float32]
TokenArray = npt.NDArray[np.int32]
_LOG = ct.CFUNCTYPE(None, ct.c_int, ct.c_char_p, ct.c_void_p)
_PAST_DRIFT_BYTES = 512  # more than any parameter struct takes


class _Blob(ct.Structure):
    """A parameter struct of unknown length: by value it is a copy on the stack, where more does no harm."""

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


class LlamaReference:
    """One llama.cpp model and context; one sequence."""

    def __init__(self, model: str, *, context: int, threads: int, flash: bool, ubatch: int = 512) -> None:
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        self._log: list[str] = []
        self._llama = ct.CDLL(str(find_library()), mode=ct.RTLD_LOCAL)
        self._sink = _LOG(lambda level, text, _: self._log.append(text.decode(errors="replace")))
        self._function("llama_log_set", None, _LOG, ct.c_void_p)(self._sink, None)
        self._function("llama_backend_init", None)()
        parameters = self._function("llama_model_default_params", _Blob)()
        load = self._function("llama_model_load_from_file", ct.c_void_p, ct.c_char_p, _Blob)
        self._model = self._alive(load(model.encode(), parameters), "load the model")
        self._context = self._new_context(context, threads, flash, ubatch)
        vocabulary = self._function("llama_model_get_vocab", ct.c_void_p, ct.c_void_p)(self._model)
        self.vocabulary = int(self._function("llama_vocab_n_tokens", ct.c_int32, ct.c_void_p)(vocabulary))
        self._capacity = context
        new_batch = self._function("llama_batch_init", _Batch, ct.c_int32, ct.c_int32, ct.c_int32)
        self._batch = new_batch(context, 0, 1)
        self._decode = self._function("llama_decode", ct.c_int32, ct.c_void_p, _Batch)
        self._row = self._function("llama_get_logits_ith", ct.POINTER(ct.c_float), ct.c_void_p, ct.c_int32)

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._llama, name)
        function.restype, function.argtypes = result, list(arguments)
        return function

    def _alive(self, pointer: int | None, what: str) -> int:
        if not pointer:
            raise SystemExit(f"llama.cpp could not {what}:\n{''.join(self._log[-5:])}")
        return pointer

    def _new_context(self, context: int, threads: int, flash: bool, ubatch: int) -> int:
        parameters = self._function("llama_context_default_params", _Blob)()
        _set_context_fields(parameters, context, threads, flash, ubatch)
        new = self._function("llama_init_from_model", ct.c_void_p, ct.c_void_p, _Blob)
        pointer = self._alive(new(self._model, parameters), "create a context")
        for name, wanted in (
            ("llama_n_batch", context),
            ("llama_n_ubatch", min(ubatch, context)),
            ("llama_n_seq_max", 1),
            ("llama_n_threads", threads),
            ("llama_n_threads_batch", threads),
        ):
            seen = self._function(name, ct.c_int32, ct.c_void_p)(pointer)
            if seen != wanted:
                raise SystemExit(
                    f"{name} is {seen}, {wanted} was set: this llama.cpp lays its parameters out otherwise"
                )
        said = re.search(r"flash_attn\s*=\s*(\w+)", "".join(self._log))
        if said is None or said[1] != ("enabled" if flash else "disabled"):
            raise SystemExit(f"flash attention: {said and said[1]} was logged, {flash} was set")
        return pointer

    def forget(self) -> None:
        """Empty the context."""
        memory = self._function("llama_get_memory", ct.c_void_p, ct.c_void_p)(self._context)
        self._function("llama_memory_clear", None, ct.c_void_p, ct.c_bool)(memory, False)

    def decode(self, tokens: TokenArray, start: int, *, every: bool = False) -> FloatArray:
        """Logits, float32 [1 or n, vocabulary], of the last token or of every token."""
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for index, token in enumerate(tokens.tolist()):
            batch.token[index], batch.pos[index] = token, start + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = int(every or index == count - 1)
        status = self._decode(self._context, batch)
        if status:
            raise SystemExit(f"llama_decode failed with status {status}")
        wanted = range(count) if every else (count - 1,)
        rows = [np.ctypeslib.as_array(self._row(self._context, i), (self.vocabulary,)).copy() for i in wanted]
        return np.stack(rows)


def _set_context_fields(parameters: _Blob, context: int, threads: int, flash: bool, ubatch: int) -> None:
    """Set context, batch and thread counts and flash_attn_type, at places found by their defaults."""
    raw = bytearray(bytes(parameters.raw))
    words = struct.unpack_from(f"<{len(raw) // 4}i", raw)
    if words[:4] != (512, 2048, 512, 1):
        raise SystemExit(f"llama_context_params begins with {words[:4]}: unknown layout")
    thread_word = next(i for i in range(4, 16) if words[i : i + 2] == (4, 4))
    enum_word = next(i for i in range(thread_word, 24) if words[i : i + 4] == (-1, -1, -1, -1))
    struct.pack_into("<3i", raw, 0, context, context, ubatch)
    struct.pack_into("<2i", raw, 4 * thread_word, threads, threads)
    struct.pack_into("<i", raw, 4 * (enum_word + 3), int(flash))  # rope, pooling, attention, flash
    ct.memmove(parameters.raw, bytes(raw), len(raw))  # kv_unified is off by default: the faster setting on CPUs


def compute(jobs: Sequence[Mapping[str, Any]]) -> None:
    """Every token's logits for each job, whose tokens are decoded in `chunks` of the given lengths, one batch each."""
    kept = []  # llama.cpp calls the log callback of whichever was made last, at any time
    for job in jobs:
        tokens: TokenArray = np.load(job["tokens"])
        context = -(-len(tokens) // 256) * 256
        reference = LlamaReference(job["model"], context=context, threads=1, flash=job["flash"])
        kept.append(reference)
        starts = np.cumsum([0, *job["chunks"]])
        parts = [
            reference.decode(tokens[first:last], int(first), every=True) for first, last in itertools.pairwise(starts)
        ]
        np.save(job["logits"], np.concatenate(parts))


def _time(reference: LlamaReference, tokens: TokenArray, what: str, repeat: int, steps: int) -> list[float]:
    """Seconds of each repetition: of one prefill, or of `steps` decode steps after it."""
    seconds = []
    for _ in range(repeat):
        reference.forget()
        begin = time.perf_counter()
        logits = reference.decode(tokens, 0)
        if what == "decode":
            begin = time.perf_counter()
            for step in range(steps):
                logits = reference.decode(logits.argmax(axis=1).astype(np.int32), len(tokens) + step)
        seconds.append(time.perf_counter() - begin)
    return seconds


def main(arguments: list[str]) -> None:
    """The child process: logits to a file, or timings to standard output as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=Path, help="a file with what to compute; all else is then ignored")
    parser.add_argument("--model")
    parser.add_argument("--tokens", help="int32 .npy")
    parser.add_argument("--logits", help="write the logits of every token to this .npy")
    parser.add_argument("--time", choices=("prefill", "decode"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--flash", action="store_true")
    options = parser.parse_args(arguments)
    if options.jobs:
        return compute(json.loads(options.jobs.read_text()))
    tokens: TokenArray = np.load(options.tokens)
    context = -(-(len(tokens) + options.steps) // 256) * 256
    reference = LlamaReference(
        options.model, context=context, threads=options.threads, flash=options.flash, ubatch=options.ubatch
    )
    if options.logits:
        np.save(options.logits, reference.decode(tokens, 0, every=True))
    if options.time:
        print(json.dumps({"seconds": _time(reference, tokens, options.time, options.repeat, options.steps)}))


if __name__ == "__main__":
    main(sys.argv[1:])
