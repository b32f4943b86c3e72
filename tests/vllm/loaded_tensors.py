"""One load of a model by one of vLLM's loaders, without an engine: `python -m tests.vllm.loaded_tensors`.

Reads what to load from standard input, and prints, as JSON, a digest of each tensor before vLLM packs weights for its
kernels, the mappings that hold parameters, and the sum of a forward pass's parameters once it has packed them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
import xxhash


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_128_hexdigest(raw.tobytes())}"


def read_only(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that lie in memory that this process may not write."""
    with open("/proc/self/maps") as file:
        lines = [line.split() for line in file]
    spans = [tuple(int(part, 16) for part in line[0].split("-")) for line in lines if line[1].startswith("r--s")]
    return [name for name, each in tensors.items() if any(low <= each.data_ptr() < high for low, high in spans)]


def main() -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from kvstore_connectors.vllm import register_loader
    from kvstore_connectors.vllm.model import find_weights

    register_loader()
    arguments: dict[str, Any] = json.loads(sys.stdin.readline())
    config = EngineArgs(enforce_eager=True, max_model_len=512, **arguments).create_engine_config()
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as rendezvous:
        init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        loader = get_model_loader(config.load_config)
        torch.set_default_dtype(config.model_config.dtype)
        model = loader.create_model(config, config.model_config)
        loader.load_weights(model, config.model_config)
        tensors = model.state_dict()
        found = {
            "digests": {name: digest(each) for name, each in tensors.items()}, "shared": read_only(tensors),
            "weights": find_weights(config, ""),
        }  # fmt: skip
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        found["shared_after"] = read_only(dict(model.named_parameters()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
