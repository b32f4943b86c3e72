#!/bin/sh
# xllamacpp 2026.10.11549 (llama.cpp of October 2026), gguf 0.19.0, numpy 2.4.6; Linux x86-64.
# `llama_memory_seq_add` (a context shift) and `llama_memory_seq_cp` between sequences with a buffer each (the default)
# take effect at the next `llama_decode`: until then only the positions have changed. A state that is saved in between
# has the new positions with the old keys, or, for the copy, with a buffer into which nothing was copied. Saving and
# loading report success, the size and the positions are right, and the next token's logits are wrong. The header says
# nothing of it, and no public call applies what is pending: decode a token, remove it again, and save then.
#
# Output seen (logits of the next token, loaded state against the live sequence):
#     plain: saved at once equal, after a decode equal
#     seq_add: saved at once differs, after a decode equal
#     seq_cp: saved at once differs, after a decode equal
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6
cat >"$place/save.py" <<'PYTHON'
import ctypes
import sys
from typing import Any

import gguf
import numpy as np
import xllamacpp.xllamacpp

WORDS, WIDTH, TOKENS, CUT = 100, 64, 60, 20
path = f"{sys.argv[1]}/model.gguf"
random = np.random.default_rng(0)
writer = gguf.GGUFWriter(path, "llama")
writer.add_context_length(256)
writer.add_embedding_length(WIDTH)
writer.add_block_count(2)
writer.add_feed_forward_length(WIDTH)
writer.add_head_count(2)
writer.add_head_count_kv(2)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_dimension_count(WIDTH // 2)
writer.add_vocab_size(WORDS)
writer.add_tokenizer_model("none")


def tensor(name: str, *shape: int) -> None:
    values = random.standard_normal(shape) * 3 / np.sqrt(WIDTH) if len(shape) > 1 else np.ones(shape)
    writer.add_tensor(f"{name}.weight", values.astype(np.float32))


tensor("token_embd", WORDS, WIDTH)
tensor("output_norm", WIDTH)
tensor("output", WORDS, WIDTH)
for layer in range(2):
    for norm in ("attn_norm", "ffn_norm"):
        tensor(f"blk.{layer}.{norm}", WIDTH)
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        tensor(f"blk.{layer}.{part}", WIDTH, WIDTH)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()


class Parameters(ctypes.Structure):
    """Room for the library's parameters, which begin with n_ctx, n_batch, n_ubatch, n_seq_max: more than they need."""

    _fields_ = [("words", ctypes.c_uint32 * 256)]


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
POINTER, NUMBER, SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t


def call(name: str, result: Any, *kinds: Any) -> Any:
    function = library[f"llama_{name}"]
    function.restype, function.argtypes = result, kinds
    return function


load_model = call("model_load_from_file", POINTER, ctypes.c_char_p, Parameters)
new_context = call("init_from_model", POINTER, POINTER, Parameters)
context_parameters = call("context_default_params", Parameters)
new_batch = call("batch_init", Batch, NUMBER, NUMBER, NUMBER)
decode = call("decode", NUMBER, POINTER, Batch)
logits_of = call("get_logits_ith", ctypes.POINTER(ctypes.c_float), POINTER, NUMBER)
memory_of = call("get_memory", POINTER, POINTER)
remove = call("memory_seq_rm", ctypes.c_bool, POINTER, NUMBER, NUMBER, NUMBER)
shift = call("memory_seq_add", None, POINTER, NUMBER, NUMBER, NUMBER, NUMBER)
copy = call("memory_seq_cp", None, POINTER, NUMBER, NUMBER, NUMBER, NUMBER)
last_position = call("memory_seq_pos_max", NUMBER, POINTER, NUMBER)
state_size = call("state_seq_get_size", SIZE, POINTER, NUMBER)
get_state = call("state_seq_get_data", SIZE, POINTER, POINTER, SIZE, NUMBER)
set_state = call("state_seq_set_data", SIZE, POINTER, POINTER, SIZE, NUMBER)
call("backend_init", None)()
model = load_model(path.encode(), call("model_default_params", Parameters)())
assert model


def context() -> Any:
    parameters = context_parameters()
    assert parameters.words[3] == 1, "n_seq_max is elsewhere"
    parameters.words[0], parameters.words[3] = 256, 2
    return new_context(model, parameters)


def logits(of: Any, tokens: list[int], position: int, sequence: int) -> np.ndarray:
    batch = new_batch(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index], batch.pos[index] = token, position + index
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        batch.logits[index] = index == len(tokens) - 1
    assert decode(of, batch) == 0
    return np.ctypeslib.as_array(logits_of(of, len(tokens) - 1), (WORDS,)).copy()


def saved(of: Any, sequence: int) -> Any:
    state = ctypes.create_string_buffer(state_size(of, sequence))
    assert get_state(of, state, len(state), sequence) == len(state)
    return state


def verdict(state: Any, position: int, expected: np.ndarray) -> str:
    other = context()
    assert set_state(other, state, len(state), 0) == len(state)
    assert last_position(memory_of(other), 0) == position - 1
    difference = np.abs(logits(other, [5], position, 0) - expected).max()
    return "equal" if difference < 0.1 else "differs" if difference > 1 else f"by {difference}"


prompt = np.random.default_rng(1).integers(1, WORDS, TOKENS).tolist()
for what in ("plain", "seq_add", "seq_cp"):
    live, sequence, position = context(), 0, TOKENS
    logits(live, prompt, 0, 0)
    memory = memory_of(live)
    if what == "seq_add":
        assert remove(memory, 0, 0, CUT)
        shift(memory, 0, CUT, -1, -CUT)
        position -= CUT
    if what == "seq_cp":
        copy(memory, 0, 1, -1, -1)
        sequence = 1
    at_once = saved(live, sequence)
    expected = logits(live, [5], position, sequence)
    assert remove(memory, sequence, position, -1)
    after = verdict(saved(live, sequence), position, expected)
    print(f"{what}: saved at once {verdict(at_once, position, expected)}, after a decode {after}")
PYTHON
"$place/venv/bin/python" "$place/save.py" "$place" 2>"$place/errors" | tee "$place/output"
diff - "$place/output" <<'SEEN'
plain: saved at once equal, after a decode equal
seq_add: saved at once differs, after a decode equal
seq_cp: saved at once differs, after a decode equal
SEEN
