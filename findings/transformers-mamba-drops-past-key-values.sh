#!/bin/sh
# Transformers 5.24.0: MambaForCausalLM takes `past_key_values=` without an error and does not use it. Only `cache=`
# (formerly `cache_params=`) reaches the layers, although every other causal model takes its cache by
# `past_key_values`, and the DynamicCache that is given is the right one. The cache stays empty and the last token is
# computed as the first of a prompt, so code that treats all models alike gets wrong logits and no message. See whether
# the cache has a state after the first call.
#
# Output seen:
#     past_key_values: state False, differs
#     cache: state True, equal
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 ||
    "$place/venv/bin/pip" install --quiet torch==2.13.0
"$place/venv/bin/pip" install --quiet transformers==5.24.0
"$place/venv/bin/python" - <<'PYTHON' 2>"$place/errors" | tee "$place/output"
import torch
from transformers import DynamicCache, MambaConfig, MambaForCausalLM

torch.manual_seed(0)
config = MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=8)
model = MambaForCausalLM(config).eval()
ids = torch.randint(0, 100, (1, 12))
with torch.no_grad():
    expected = model(ids).logits[:, -1]
    for name in ("past_key_values", "cache"):
        cache = DynamicCache(config=config)
        model(ids[:, :11], **{name: cache}, use_cache=True)
        state = all(layer.has_previous_state[0] for layer in cache.layers)
        found = model(ids[:, 11:], **{name: cache}, use_cache=True).logits[:, -1]
        print(f"{name}: state {state}, {'equal' if torch.allclose(found, expected, atol=1e-4) else 'differs'}")
PYTHON
printf 'past_key_values: state False, differs\ncache: state True, equal\n' | diff - "$place/output"
