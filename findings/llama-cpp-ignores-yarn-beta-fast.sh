#!/usr/bin/env bash
# llama.cpp reads a GGUF file's `rope.scaling.yarn_beta_fast` for some architectures alone.
#
# Versions: xllamacpp 2026.10.11549 (llama.cpp), gguf 0.17.1, numpy 2.x; CPython 3.11, Linux x86-64.
# The library knows the keys `*.rope.scaling.yarn_ext_factor`, `yarn_attn_factor`, `yarn_beta_fast` and `yarn_beta_slow`. A
# `llama` model with YaRN gives the same hidden states whatever `yarn_beta_fast` says, without a warning; `attn_factor`,
# which stands beside it, is applied.
# Seen:
#   yarn_beta_fast 32 and 2: largest difference 0.0
#   attn_factor 1 and 1.5:   largest difference over 0.01
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "xllamacpp==2026.10.11549" "gguf==0.17.1" "numpy>=2"
cat > "$folder/run.py" <<'PYTHON'
import sys
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

FOLDER, WIDTH, LAYERS = Path(sys.argv[1]), 64, 2


def write(name, **keys):
    path, random = FOLDER / f"{name}.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    tokens = ["<end>", *(chr(byte) if byte in printable else chr(next(others)) for byte in range(256))]
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // 2)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * 256)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_string("llama.rope.scaling.type", "yarn")
    for key, value in {"factor": 8.0, **keys}.items():
        writer.add_float32(f"llama.rope.scaling.{key}", value)
    writer.add_uint32("llama.rope.scaling.original_context_length", 32)

    def tensor(called, *shape):
        ones = len(shape) == 1
        values = np.ones(shape) if ones else random.standard_normal(shape) * (3 / np.sqrt(shape[-1]))
        writer.add_tensor(f"{called}.weight", values.astype(np.float32))

    tensor("token_embd", len(tokens), WIDTH)
    tensor("output_norm", WIDTH)
    tensor("output", len(tokens), WIDTH)
    for layer in range(LAYERS):
        for part in ("attn_norm", "ffn_norm"):
            tensor(f"blk.{layer}.{part}", WIDTH)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            tensor(f"blk.{layer}.{part}", WIDTH, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def embedding(path):
    """The last token's hidden state, at length 1."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(path), 256, 1, False
    params.cpuparams.n_threads, params.embedding = 1, True
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_LAST
    answer = xllamacpp.Server(params).handle_embeddings({"input": "the cat sat on the mat and the hat of the rat " * 2})
    return np.array(answer["data"][0]["embedding"])


def difference(one, other):
    return float(np.abs(one - other).max())


plain = embedding(write("plain", yarn_beta_fast=32.0, attn_factor=1.0))
beta = difference(plain, embedding(write("beta", yarn_beta_fast=2.0, attn_factor=1.0)))
attention = difference(plain, embedding(write("attention", yarn_beta_fast=32.0, attn_factor=1.5)))
print(f"yarn_beta_fast 32 and 2: largest difference {beta}")
print(f"attn_factor 1 and 1.5:   largest difference {attention}")
sys.exit(0 if beta == 0.0 and attention > 0.01 else 1)
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder" 2>"$folder/log" || { grep -A12 Traceback "$folder/log"; tail -3 "$folder/log"; exit 1; }
