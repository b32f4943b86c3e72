"""SGLang on kvstored: a storage backend behind HiCache's host pools, and a linker of its device pools.

SGLang loads either class by name: `module_path` (or `linker_module_path`) "kvstore_connectors.sglang" and the class's
name. SGLang and torch are imported on first use; the other modules can be tested without them. docs/sglang.md is the
manual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore_connectors.engine_session import engine_class

if TYPE_CHECKING:
    from kvstore_connectors.sglang.backend import KVStoreHiCache
    from kvstore_connectors.sglang.linker import KVStoreLinker

__all__ = ["KVStoreHiCache", "KVStoreLinker"]

_FILES = {"KVStoreHiCache": "backend", "KVStoreLinker": "linker"}


def __getattr__(name: str) -> Any:
    return engine_class(__name__, _FILES, name, engine="SGLang", install="pip install sglang (0.5.23 or later)")
