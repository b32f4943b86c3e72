"""vLLM (0.32 and later): kvstored as a secondary tier of vLLM's own tiered offloading, behind its pinned CPU tier.

The door: `"type": "KVStoreTier", "module_path": "kvstore_client.hooks.vllm_tier"` names the tier to vLLM, and
`kv_connector="KVStoreOffloadingConnector"` vLLM's own connector with the tier's namespace filled in. vLLM and torch are
imported when one of them is asked for: the other modules hold what can be tested without. docs/vllm-tier.md is the
manual.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore_client.hooks.vllm_tier.connector import KVStoreOffloadingConnector
    from kvstore_client.hooks.vllm_tier.tier import KVStoreTier

__all__ = ["KVStoreOffloadingConnector", "KVStoreTier"]

_FILES = {"KVStoreOffloadingConnector": "connector", "KVStoreTier": "tier"}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("vllm", "torch"):
            raise
        raise ImportError(
            f"{name} runs inside vLLM, and {error.name} is not installed here: "
            "install vllm 0.32 or later into the environment that runs it"
        ) from None
