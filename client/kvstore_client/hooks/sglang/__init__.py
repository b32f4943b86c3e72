"""SGLang on kvstored: a storage backend behind HiCache's host pools, and a linker of its device pools.

The door: SGLang loads either class by name, `module_path` (or `linker_module_path`) "kvstore_client.hooks.sglang" and
the class's name. SGLang and torch are imported when one of them is asked for: the other modules hold what can be tested
without. docs/sglang.md is the manual.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore_client.hooks.sglang.backend import KVStoreHiCache
    from kvstore_client.hooks.sglang.linker import KVStoreLinker

__all__ = ["KVStoreHiCache", "KVStoreLinker"]

_FILES = {"KVStoreHiCache": "backend", "KVStoreLinker": "linker"}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("sglang", "torch"):
            raise
        raise ImportError(
            f"{name} runs inside SGLang, and {error.name} is not there: "
            "pip install sglang (0.5.23 or later) into the environment that runs it"
        ) from None
