"""A llama.cpp/ggml-based inference engine whose KV state is in kvstored.

The package imports heavy modules only when a name is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore_engine.executor import Executor
    from kvstore_engine.gguf import GGUFError, GGUFFile
    from kvstore_engine.graph import SequenceSlice, chunk_plan
    from kvstore_engine.model import Model, ModelConfig, UnsupportedModel, load_model
    from kvstore_engine.pool import BlockPool

__all__ = [
    "BlockPool",
    "Executor",
    "GGUFError",
    "GGUFFile",
    "Model",
    "ModelConfig",
    "SequenceSlice",
    "UnsupportedModel",
    "chunk_plan",
    "load_model",
]

_HOMES = {
    "BlockPool": "kvstore_engine.pool",
    "Executor": "kvstore_engine.executor",
    "GGUFError": "kvstore_engine.gguf",
    "GGUFFile": "kvstore_engine.gguf",
    "Model": "kvstore_engine.model",
    "ModelConfig": "kvstore_engine.model",
    "SequenceSlice": "kvstore_engine.graph",
    "UnsupportedModel": "kvstore_engine.model",
    "chunk_plan": "kvstore_engine.graph",
    "load_model": "kvstore_engine.model",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
