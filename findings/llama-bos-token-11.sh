#!/bin/sh
# xllamacpp 2026.10.11549 (llama.cpp of October 2026), gguf 0.17.1.
# A GGUF file with a GPT-2 vocabulary (tokenizer.ggml.model "gpt2") that names no bos_token_id and no eos_token_id:
# llama.cpp's server does not give an empty `bos_token` to the file's chat template. It takes token 11 for both, whatever
# that is (GPT-2's own vocabulary has a comma there), and gives the template that token's text.
# Seen: {"prompt":"[L|L]x"} for a vocabulary whose token 11 is the letter L.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install xllamacpp==2026.10.11549 gguf==0.17.1 numpy==2.2.6
cat > "$folder/ask.py" <<'PY'
import json, os, sys, urllib.request
import gguf, numpy as np, xllamacpp

path = sys.argv[1]
tokens = [chr(65 + i) for i in range(26)] + ["AB", "Ċ", "Ġ", "x", "y", "z"]  # token 11 is L
writer = gguf.GGUFWriter(path, "llama")
width, hidden = 64, 64
writer.add_context_length(256); writer.add_embedding_length(width); writer.add_block_count(1)
writer.add_feed_forward_length(hidden); writer.add_head_count(2); writer.add_head_count_kv(2)
writer.add_layer_norm_rms_eps(1e-5); writer.add_rope_dimension_count(32)
writer.add_tokenizer_model("gpt2"); writer.add_tokenizer_pre("default"); writer.add_token_list(tokens)
writer.add_token_types([1] * len(tokens)); writer.add_token_merges(["A B"])
writer.add_chat_template("[{{ bos_token }}|{{ eos_token }}]{{ messages[0].content }}")
def add(name, *shape): writer.add_tensor(name, np.ones(shape, np.float32) * 0.01)
add("token_embd.weight", len(tokens), width); add("output_norm.weight", width); add("output.weight", len(tokens), width)
for name in ("attn_q", "attn_k", "attn_v", "attn_output"): add(f"blk.0.{name}.weight", width, width)
for name in ("attn_norm", "ffn_norm"): add(f"blk.0.{name}.weight", width)
for name in ("ffn_gate", "ffn_up", "ffn_down"): add(f"blk.0.{name}.weight", hidden, width)
writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file(); writer.close()

wanted = xllamacpp.CommonParams()
wanted.model.path, wanted.n_ctx, wanted.warmup, wanted.ui, wanted.verbosity = path, 256, False, False, -1
server = xllamacpp.Server(wanted)
body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
request = urllib.request.Request(server.listening_address + "/apply-template", body, {"Content-Type": "application/json"})
prompt = json.load(urllib.request.urlopen(request))["prompt"]
print(prompt, flush=True)
os._exit(0 if prompt == "[L|L]x" else 1)
PY
"$folder/venv/bin/python" "$folder/ask.py" "$folder/tiny.gguf"
