"""llama.cpp's own tokenizer, as the reference that ours must equal; always in a child process.

Owns the binding of the few `llama_*` vocabulary functions in xllamacpp's shared library. It is a child
process because two ggml libraries in one process crash each other, and because GGML_ASSERT aborts.

Parameter structs travel by value and drift between builds. Both ABIs we run on pass a struct of this size in
memory, so an oversized opaque blob is passed back as it was received; only `vocab_only` is set, at an offset
that is checked against the defaults around it. Run as a script it reads one JSON request on stdin and answers
on stdout.
"""

import ctypes
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Request = tuple[str, bool, bool]

_VOCAB_ONLY_OFFSET = 72
_DEFAULTS_THERE = bytes([0, 0, 1, 0])  # vocab_only, check_tensors, use_extra_bufts, no_host


class _ModelParams(ctypes.Structure):
    _fields_ = (("opaque", ctypes.c_uint8 * 512),)


def library_path() -> Path | None:
    """xllamacpp's shared library, found without importing it; None if it is not installed."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        return None
    return next(iter(Path(spec.origin).parent.glob("xllamacpp*.so")), None)


def tokenize(gguf: Path, requests: Sequence[Request]) -> list[list[int]]:
    """llama.cpp's token ids for (text, add_special, parse_special) requests. RuntimeError if the child fails."""
    return tokenize_many([(gguf, requests)])[0]


def tokenize_many(jobs: Sequence[tuple[Path, Sequence[Request]]]) -> list[list[list[int]]]:
    """`tokenize` for several files in one child."""
    answers = _in_child([{"gguf": str(gguf), "requests": list(requests)} for gguf, requests in jobs])
    return [[list(ids) for ids in answer["ids"]] for answer in answers]


def vocabulary(gguf: Path) -> dict[str, Any]:
    """`end_ids`: sorted ids that end a generation; `pieces`: each token's bytes as hex, specials as text."""
    return _in_child([{"gguf": str(gguf), "requests": [], "vocabulary": True}])[0]


def _in_child(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    child = subprocess.run(
        [sys.executable, __file__], input=json.dumps(jobs), capture_output=True, text=True, timeout=120
    )
    if child.returncode != 0:
        raise RuntimeError(f"llama.cpp's tokenizer failed ({child.returncode}): {child.stderr[-2000:]}")
    answers: list[dict[str, Any]] = json.loads(child.stdout)
    return answers


class _Llama:
    def __init__(self, gguf: str) -> None:
        path = library_path()
        if path is None:
            raise SystemExit("xllamacpp is not installed")
        lib = ctypes.CDLL(str(path))
        lib.llama_model_default_params.restype = _ModelParams
        lib.llama_model_load_from_file.restype = ctypes.c_void_p
        lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _ModelParams]
        lib.llama_model_get_vocab.restype = ctypes.c_void_p
        lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        lib.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
        lib.llama_vocab_is_eog.restype = ctypes.c_bool
        lib.llama_vocab_is_eog.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        lib.llama_tokenize.argtypes = [
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_bool,
            ctypes.c_bool,
        ]
        lib.llama_token_to_piece.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_char_p,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_bool,
        ]
        params = lib.llama_model_default_params()
        around = slice(_VOCAB_ONLY_OFFSET, _VOCAB_ONLY_OFFSET + len(_DEFAULTS_THERE))
        if bytes(params.opaque)[around] != _DEFAULTS_THERE:
            raise SystemExit("llama_model_params of this xllamacpp build has another layout than the one we know")
        params.opaque[_VOCAB_ONLY_OFFSET] = 1
        model = lib.llama_model_load_from_file(gguf.encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp cannot load {gguf}")
        self.lib, self.vocab = lib, lib.llama_model_get_vocab(model)

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        buffer = (ctypes.c_int32 * room)()
        count = self.lib.llama_tokenize(self.vocab, data, len(data), buffer, room, add_special, parse_special)
        if count < 0:
            raise SystemExit(f"llama_tokenize wants room for {-count} tokens, had {room}")
        return list(buffer[:count])

    def piece(self, token_id: int) -> bytes:
        buffer = ctypes.create_string_buffer(4096)
        count = self.lib.llama_token_to_piece(self.vocab, token_id, buffer, len(buffer), 0, True)
        return buffer.raw[:count]

    def describe(self) -> dict[str, Any]:
        count = self.lib.llama_vocab_n_tokens(self.vocab)
        ends = [i for i in range(count) if self.lib.llama_vocab_is_eog(self.vocab, i)]
        return {"end_ids": ends, "pieces": [self.piece(i).hex() for i in range(count)]}


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    llama = _Llama(job["gguf"])
    answer: dict[str, Any] = {"ids": [llama.tokenize(*entry) for entry in job["requests"]]}
    if job.get("vocabulary"):
        answer.update(llama.describe())
    return answer


if __name__ == "__main__":
    json.dump([_answer(job) for job in json.load(sys.stdin)], sys.stdout)
