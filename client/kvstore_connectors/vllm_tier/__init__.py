"""vLLM (0.32 and later): kvstored as a secondary tier of vLLM's own tiered offloading, behind its pinned CPU tier.

`"type": "KVStoreTier", "module_path": "kvstore_connectors.vllm_tier"` names the tier to vLLM, and
`kv_connector="KVStoreOffloadingConnector"` names vLLM's own connector with the tier's namespace filled in. vLLM and
torch are imported on first use of one of these classes; the other modules can be tested without them. docs/vllm-tier.md
is the manual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore_connectors.engine_session import engine_class

if TYPE_CHECKING:
    from kvstore_connectors.vllm_tier.connector import KVStoreOffloadingConnector
    from kvstore_connectors.vllm_tier.tier import KVStoreTier

__all__ = ["KVStoreOffloadingConnector", "KVStoreTier"]

_FILES = {"KVStoreOffloadingConnector": "connector", "KVStoreTier": "tier"}


def __getattr__(name: str) -> Any:
    return engine_class(__name__, _FILES, name, engine="vLLM", install="install vllm 0.32 or later")
