"""SmolLM2-135M as the safetensors folder that vLLM reads, made from the GGUF that the engine's tests use.

Owns the export, once for each dtype, into the model cache. Run it with the Python of the vLLM environment (it needs
transformers and gguf): `python tests/vllm/smollm2.py bfloat16` prints the folder.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from kvstore_engine.models.cache import exclusive, models_directory
from kvstore_engine.models.fetch import fetch
from kvstore_engine.models.known import KNOWN_MODELS

NAME = "smollm2-135m-instruct"


def exported(dtype: str = "bfloat16") -> Path:
    """The folder with the model in `dtype` ("bfloat16" or "float32"); made on first use, which takes half a minute."""
    target = models_directory() / f"{NAME}-hf-{dtype}"
    with exclusive(target):
        if not target.exists():
            gguf = fetch(KNOWN_MODELS[NAME])
            with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as folder:
                _export(gguf, dtype, Path(folder))
                shutil.copytree(folder, target.with_suffix(".part"), dirs_exist_ok=True)
            target.with_suffix(".part").rename(target)
    return target


def _export(gguf: Path, dtype: str, folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"{NAME}: converting to {dtype} safetensors", file=sys.stderr)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=getattr(torch, dtype))
    model.config.__dict__.pop("quantization_config", None)  # else save_pretrained refuses what came from a GGUF
    model.hf_quantizer = None
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


if __name__ == "__main__":
    print(exported(*sys.argv[1:2]))
