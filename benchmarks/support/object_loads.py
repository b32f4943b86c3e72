"""One load of a model in a process of its own, by one of several loaders: `python object_loads.py LOADER ARGUMENTS`.

Owns what is timed: from the call of the loader until every page of every tensor has been read, imports left out. The
last line is JSON: the seconds, the private memory that the load added, and a digest of all tensors' bytes where asked.
Runs in the rivals' own environment for their loaders, so it imports nothing of ours for those.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PAGE = 4096
Tensors = dict[str, Any]


def private_bytes() -> int:
    """Memory that is this process's alone, and its page tables."""
    fields = {}
    for path in ("/proc/self/smaps_rollup", "/proc/self/status"):
        for line in Path(path).read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.strip().endswith("kB"):
                fields[name] = int(rest.split()[0]) * 1024
    return fields["Private_Clean"] + fields["Private_Dirty"] + fields["VmPTE"]


def by_runai(path: str) -> tuple[Tensors, object]:
    from runai_model_streamer import SafetensorsStreamer

    streamer = SafetensorsStreamer().__enter__()  # outside a context it refuses requests; the tensors are in its memory
    streamer.stream_files([path])
    return dict(streamer.get_tensors()), streamer


def by_fastsafetensors(path: str) -> tuple[Tensors, object]:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
    loader.add_filenames({0: [path]})
    buffers = loader.copy_files_to_device()
    return {key: buffers.get_tensor(key) for key in loader.get_keys()}, (loader, buffers)


def by_store(sockets: str, name: str) -> tuple[Tensors, object]:
    from kvstore_client.objects.store import open_objects

    store = open_objects(sockets)
    mapped = store.map(name)
    return {key: mapped.raw(key) for key in mapped}, (store, mapped)


def by_model(sockets: str, name: str) -> tuple[Tensors, object]:
    from kvstore_connectors.transformers import load_model

    model = load_model(name, sockets)
    return dict(model.state_dict()), model


def by_put(sockets: str, path: str, name: str) -> tuple[Tensors, object]:
    """The first process: it fills the store from the file, and maps what it put."""
    from kvstore_client.objects.sources import weights_source
    from kvstore_client.objects.store import STAGING_BYTES, open_objects

    with open_objects(sockets, staging_bytes=STAGING_BYTES) as store, weights_source(Path(path)) as source:
        store.put(name, source, durability="none")
    return by_model(sockets, name)


def by_engine(model: str, sockets: str) -> tuple[Tensors, object]:
    """Open a model as `kvengine generate` does, with a session for its K/V, and answer one token."""
    from kvstore_engine.batching.request import RequestSettings
    from kvstore_engine.generation import Prompt
    from kvstore_engine.loaded_model import LoadOptions, open_model

    with open_model(Path(model), LoadOptions(kvstore=Path(sockets), warm_up=False)) as loaded:
        loaded.generator.generate(Prompt("the"), RequestSettings(max_tokens=1, ignore_end=True))
    return {}, None


LOADERS: dict[str, Callable[..., tuple[Tensors, object]]] = {
    "runai": by_runai, "fastsafetensors": by_fastsafetensors, "store": by_store, "model": by_model, "put": by_put,
    "engine": by_engine,
}  # fmt: skip


def pages_of(tensors: Tensors) -> Iterator[Any]:
    for tensor in tensors.values():
        raw = tensor if hasattr(tensor, "__array_interface__") and tensor.dtype.itemsize == 1 else None
        if raw is None:
            import torch

            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield raw


def main(loader: str, *arguments: str) -> None:
    warm_imports(loader)
    gc.collect()
    before = private_bytes()
    began = time.perf_counter()
    tensors, held = LOADERS[loader](*[each for each in arguments if each != "--digest"])
    touched = sum(int(raw[::PAGE].sum()) for raw in pages_of(tensors))
    taken_s = time.perf_counter() - began
    gc.collect()
    found = {"seconds": taken_s, "private_bytes": private_bytes() - before, "touched": touched}
    if "--digest" in arguments:
        import xxhash

        found["digests"] = {
            name: xxhash.xxh3_128_hexdigest(raw.tobytes()) for name, raw in zip(tensors, pages_of(tensors), strict=True)
        }
    print(json.dumps(found))
    del tensors, held


def warm_imports(loader: str) -> None:
    """Import what the loader needs, and run torch's first operations, before anything is measured."""
    if loader == "runai":
        import runai_model_streamer  # noqa: F401
    elif loader == "fastsafetensors":
        import fastsafetensors  # noqa: F401
    elif loader == "engine":
        from kvstore_engine.ggml import load_library
        from kvstore_engine.loaded_model import open_model  # noqa: F401

        load_library()
    elif loader != "store":
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

        import kvstore_connectors.transformers  # noqa: F401

        small = {
            "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
            "num_key_value_heads": 2, "num_hidden_layers": 1,
        }  # fmt: skip
        for config in (LlamaConfig(**small), Qwen3MoeConfig(**small, num_experts=2, moe_intermediate_size=8)):
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            type(made).from_pretrained(None, config=made.config, state_dict=made.state_dict(), dtype="auto")
    if loader not in ("runai", "fastsafetensors"):
        import grpc  # noqa: F401

        import kvstore_client.objects.store  # noqa: F401


if __name__ == "__main__":
    main(*sys.argv[1:])
