"""What the tier reports to vLLM's metrics: how each chunk ended, and whether kvstored answers."""

from __future__ import annotations

from collections import Counter

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from kvstore_connectors.vllm_tier.jobs import Ended

LOADS = "vllm:kv_offload_kvstored_load_chunks"
STORES = "vllm:kv_offload_kvstored_store_chunks"
CONNECTED = "vllm:kv_offload_kvstored_connected"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    return {
        LOADS: OffloadingCounterMetadata("Chunks that were to be loaded from kvstored, by outcome.", ("outcome",)),
        STORES: OffloadingCounterMetadata("Chunks that were to be stored in kvstored, by outcome.", ("outcome",)),
        CONNECTED: OffloadingGaugeMetadata("Whether kvstored answers (1) or not (0)."),
    }


class Counts:
    """Since the last report."""

    def __init__(self) -> None:
        self._chunks: Counter[tuple[str, str]] = Counter()
        self._connected: float | None = None

    def add(self, ended: Ended) -> None:
        metric = LOADS if ended.is_load else STORES
        for outcome, chunks in ended.counts().items():
            self._chunks[metric, outcome] += chunks

    def take(self, *, is_connected: bool) -> OffloadingConnectorStats | None:
        """None when nothing has changed."""
        if not self._chunks and self._connected == float(is_connected):
            return None
        stats = OffloadingConnectorStats()
        for (metric, outcome), chunks in self._chunks.items():
            stats.increase_counter(metric, chunks, (outcome,))
        self._connected = float(is_connected)
        stats.set_gauge(CONNECTED, self._connected)
        self._chunks.clear()
        return stats
