#!/bin/sh
# Transformers 5.24.0: `generate(sequence, cache=...)` with the cache that an earlier `generate` returned computes only
# what that cache lacks, for models with attention, hybrids with Mamba layers among them. For a model of Mamba layers
# alone (Mamba, Mamba2, FalconMamba) it feeds the whole sequence on top of the state that holds it already: no error,
# no warning, other logits. The cache knows no length there, so nothing is cut off. Such a model wants the new tokens
# alone, with the same cache; the others want the whole sequence.
#
# Output seen (20 tokens, 6 generated, then one more; "fed" is the number of tokens that reach the embedding):
#     Llama, whole sequence: fed 1, equal
#     Bamba, whole sequence: fed 1, equal
#     Mamba2, whole sequence: fed 26, differs
#     Mamba2, last token: fed 1, equal
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 ||
    "$place/venv/bin/pip" install --quiet torch==2.13.0
"$place/venv/bin/pip" install --quiet transformers==5.24.0
"$place/venv/bin/python" - <<'PYTHON' 2>"$place/errors" | tee "$place/output"
import torch
from transformers import BambaConfig, BambaForCausalLM, LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

torch.manual_seed(0)
small = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "eos_token_id": None, "pad_token_id": 0}
heads = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
state = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
models = {
    "Llama": LlamaForCausalLM(LlamaConfig(**small, **heads)),
    "Bamba": BambaForCausalLM(BambaConfig(**small, **heads, **state, attn_layer_indices=[1])),
    "Mamba2": Mamba2ForCausalLM(Mamba2Config(**small, num_heads=8, head_dim=16, state_size=16, n_groups=1)),
}
for weight in (weight for model in models.values() for weight in model.parameters() if weight.ndim == 2):
    weight.data *= 3  # so that what is computed depends on what is fed
prompt = torch.randint(3, 100, (1, 20))


def compare(name: str, given: str) -> None:
    model, fed = models[name].eval(), []
    with torch.no_grad():
        first = model.generate(prompt, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        expected = model(first.sequences).logits[:, -1]
        hook = model.get_input_embeddings().register_forward_hook(lambda _, ids, __: fed.append(ids[0].shape[1]))
        ids = first.sequences if given == "whole sequence" else first.sequences[:, -1:]
        following = model.generate(
            ids, cache=first.cache, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        hook.remove()
    equal = torch.allclose(following.logits[0], expected, atol=1e-3)
    print(f"{name}, {given}: fed {fed[0]}, {'equal' if equal else 'differs'}")


compare("Llama", "whole sequence")
compare("Bamba", "whole sequence")
compare("Mamba2", "whole sequence")
compare("Mamba2", "last token")
PYTHON
diff - "$place/output" <<'SEEN'
Llama, whole sequence: fed 1, equal
Bamba, whole sequence: fed 1, equal
Mamba2, whole sequence: fed 26, differs
Mamba2, last token: fed 1, equal
SEEN
