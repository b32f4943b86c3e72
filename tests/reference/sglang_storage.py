"""SGLang's real classes without all of SGLang's dependencies: only what a backend or a linker meets is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

UNUSED = ("torchvision",)  # that its configurations of models import, and no pool needs


def sglang_storage() -> tuple[ModuleType, ModuleType] | None:
    """Return SGLang's modules `hicache_storage` and `storage`; None where SGLang or torch is not installed.

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


def import_sglang_pools() -> None:
    """Make SGLang's pools, trees and linkers importable; they need most of what SGLang does (docs/sglang.md). Raises
    ImportError that says what is missing."""
    if sglang_storage() is None:
        raise ImportError("sglang and torch are not installed")
    importlib.import_module("transformers.processing_utils")  # it looks for torchvision itself
    sys.meta_path.append(_Unused())
    importlib.import_module("sglang.srt.mem_cache.unified_cache.linker_factory")
    importlib.import_module("sglang.srt.mem_cache.unified_cache.unified_cache_linker")


class _Unused:
    """Finds empty modules for what is not installed of `UNUSED`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_unused = name.partition(".")[0] in UNUSED
        return ModuleSpec(name, self, is_package=True) if is_unused else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _EmptyModule(ModuleType):
    """Has whatever name is asked for, as a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *_, **__: None})
