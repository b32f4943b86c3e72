"""vLLM's own OffloadingConnector, which also describes the engine and its requests to `KVStoreTier`.

vLLM gives a tier neither the weights' place nor the model's settings, and of a request only its hashes, in which an
adapter is named by its path. This module adds the rest. It moves no K/V: vLLM and the tier do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvstore_connectors.vllm.identity import Extras
from kvstore_connectors.vllm.model import describe_extras, hashes_items
from kvstore_connectors.vllm.specs import packing
from kvstore_connectors.vllm_tier.engine import engine_name, refusal
from kvstore_connectors.vllm_tier.tier import KVStoreTier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KVStoreOffloadingConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not typed where this is checked
    """vLLM's OffloadingConnector, extended to describe the engine and its requests to `KVStoreTier`. Set it up with
    `"spec_name": "TieringOffloadingSpec"`; docs/vllm-tier.md is the manual.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        self._hashed_items = False
        if role == KVConnectorRole.SCHEDULER:
            self._hashed_items = hashes_items(vllm_config)
            _name_engine(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        described = describe_extras(request, hashed_items=self._hashed_items)
        for tier in self._tiers():
            tier.describe(request.request_id, described.adapter if isinstance(described, Extras) else None)
        super().on_new_request(request)

    def _tiers(self) -> list[KVStoreTier]:
        if self.connector_scheduler is None:
            return []
        tiers = getattr(self.connector_scheduler.manager, "secondary_tiers", ())
        return [tier for tier in tiers if isinstance(tier, KVStoreTier)]


def _name_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Enter the engine's name into the settings of each `KVStoreTier`. Raises ValueError for an engine that cannot be
    served.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    ours = [tier for tier in extra.get("secondary_tiers", []) if tier.get("type") == KVStoreTier.__name__]
    if not ours:
        raise ValueError(
            "KVStoreOffloadingConnector is for KVStoreTier, and secondary_tiers has none: see docs/vllm-tier.md"
        )
    refused = refusal(vllm_config, kv_cache_config)
    if refused:
        raise ValueError(f"kvstored cannot serve this engine: {refused}")
    for tier in ours:
        name = engine_name(
            vllm_config,
            kv_cache_config,
            stated_weights=str(tier.get("weights_digest", "")),
            packing=packing(vllm_config, kv_cache_config),
            version=vllm.__version__,
        )
        tier["engine"] = name.packed()
