"""SGLang's real storage classes without SGLang's dependencies: only what a backend meets is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType


def sglang_storage() -> tuple[ModuleType, ModuleType] | None:
    """Its modules `hicache_storage` and `storage`; None where SGLang or torch is not installed.

    The package's own `__init__` pulls in all of SGLang. Where that cannot be imported, an empty package of its name and
    place is put in front, so that the two modules and what they need themselves are found.
    """
    if "sglang" not in sys.modules:
        found = importlib.util.find_spec("sglang")
        if found is None or found.submodule_search_locations is None or importlib.util.find_spec("torch") is None:
            return None
        package = ModuleType("sglang")
        package.__path__ = list(found.submodule_search_locations)
        sys.modules["sglang"] = package
    return (
        importlib.import_module("sglang.srt.mem_cache.hicache_storage"),
        importlib.import_module("sglang.srt.mem_cache.storage"),
    )
