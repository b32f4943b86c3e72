"""vLLM's own tiered offloading with our tier in it, and its CPU memory as the workers see it: all but an engine.

Owns one manager, made by vLLM's factories from a configuration as a user writes it, and the steps of a scheduler around
it. Run as a program it stores: `python -m tests.vllm.tiered_engine '{"socket": ..., "stored": [[request, chunks]]}'`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

PATIENCE_S = 60.0
PAGE_BYTES = 8192  # of one worker
TOKENS = 16
TIER = {"type": "KVStoreTier", "module_path": "kvstore_connectors.vllm_tier", "weights_digest": "tests"}


@dataclass(frozen=True)
class Shape:
    """The engine's configuration about its rows. `groups`: of KV cache, as hybrid models have several."""

    workers: int = 1
    groups: int = 1
    rows: int = 32
    dtype: str = "bfloat16"


def chunk_key(request: str, chunk: int, group: int = 0) -> OffloadKey:
    """Return a chunk's key as vLLM makes it: a hash of the prefix, and the group."""
    return make_offload_key(hashlib.sha256(f"{request}/{chunk}".encode()).digest(), group)


def content(request: str, chunk: int, group: int, worker: int) -> torch.Tensor:
    """The K/V of a chunk on one worker: int8[PAGE_BYTES]."""
    seed = hashlib.sha256(f"{request}/{chunk}/{group}/{worker}".encode()).digest()
    return torch.from_numpy(np.random.default_rng(list(seed)).integers(-128, 127, PAGE_BYTES, np.int8))


class TieredEngine:
    """`tier`: settings of ours. Made as vLLM makes it; `close` ends it as vLLM does."""

    def __init__(self, socket: str, shape: Shape | None = None, **tier: Any) -> None:
        self.shape = shape or Shape()
        patient = {"lookup_deadline_ms": 20_000, "load_deadline_ms": 20_000, "store_deadline_ms": 20_000}
        row_bytes = PAGE_BYTES * self.shape.workers
        config = OffloadingConfig(
            groups=tuple(
                OffloadingGroupConfig(TOKENS, (f"layer.{group}",), group) for group in range(self.shape.groups)
            ),
            worker_kv_bytes_per_block=PAGE_BYTES,
            enable_kv_cache_events=True,
            extra_config={
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": row_bytes * self.shape.rows,
                "secondary_tiers": [{**TIER, "socket": socket, "staging_mib": 1, **patient, **tier}],
            },
            engine_id=f"test-{uuid.uuid4()}",
            model=OffloadingModelConfig("tests", self.shape.dtype),
            cache=OffloadingCacheConfig(tokens_per_hash=TOKENS, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(0, self.shape.workers, self.shape.workers, 1, 1, 1, 0, 1, None, False),
            kv_cache_layout="LBHNC",
        )
        self.spec: Any = OffloadingSpecFactory.create_spec(config)
        self.manager: Any = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self._regions = [self._region(replace(config.parallel, rank=rank)) for rank in range(self.shape.workers)]
        self._memory = [region.create_next_worker_view(PAGE_BYTES) for region in self._regions]
        self._requests = 0
        self.adapter: str | None = ""  # of the requests that begin

    def store(self, request: str, chunks: Sequence[int], groups: Sequence[int] = (0,)) -> None:
        """Store as when the workers have copied these chunks of a prompt to the CPU; return once the tier has ended."""
        context = self.request(request, chunks, groups)
        keys = [chunk_key(request, chunk, group) for group in groups for chunk in chunks]
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        places = dict(zip(prepared.keys_to_store, prepared.store_spec.block_ids, strict=True))
        for group in groups:
            for chunk in chunks:
                row = places.get(chunk_key(request, chunk, group))
                for worker, memory in enumerate(self._memory):
                    if row is not None:
                        memory[row] = content(request, chunk, group, worker)
        if places:
            self.manager.complete_store(set(prepared.keys_to_store), context)  # vLLM keeps no order either
        self.manager.on_request_finished(context)
        self.idle()

    def loaded(self, request: str, chunks: Sequence[int], groups: Sequence[int] = (0,)) -> list[bool]:
        """Return whether each chunk is in the CPU tier after vLLM's scheduler has looked it up; its
        bytes are checked.
        """
        context = self.request(request, chunks, groups)
        keys = [chunk_key(request, chunk, group) for group in groups for chunk in chunks]
        deadline = time.monotonic() + PATIENCE_S
        results = [LookupResult.RETRY]
        while {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(results):
            assert time.monotonic() < deadline, results
            results = [self.manager.lookup(key, context) for key in keys]
            self.step()
        hits = [result is LookupResult.HIT for result in results]
        found = [key for key, is_hit in zip(keys, hits, strict=True) if is_hit]
        rows = dict(zip(found, self.manager.prepare_load(found, context).block_ids, strict=True))
        for group in groups:
            for chunk in chunks:
                row = rows.get(chunk_key(request, chunk, group))
                for worker, memory in enumerate(self._memory):
                    if row is not None:
                        assert torch.equal(memory[row], content(request, chunk, group, worker)), (request, chunk)
        self.manager.complete_load(found, context)
        self.manager.on_request_finished(context)
        return hits

    def request(self, request: str, chunks: Sequence[int], groups: Sequence[int]) -> ReqContext:
        """One that its scheduler has begun."""
        self._requests += 1
        context = ReqContext(req_id=f"{request}-{self._requests}")
        for group in groups:
            for chunk in range(max(chunks) + 1):
                context.set_offload_key_position(chunk_key(request, chunk, group), (chunk + 1) * TOKENS)
        self.tier.describe(context.req_id, self.adapter)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def idle(self) -> None:
        """Steps until no transfer is under way."""
        deadline = time.monotonic() + PATIENCE_S
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline, "transfers do not end"
            self.step()
            time.sleep(0.001)

    def figures(self) -> dict[str, float]:
        """Return the figures of the metrics since the last call."""
        stats = self.manager.get_stats()
        return {} if stats is None else dict(stats.reduce())

    def close(self) -> None:
        self._memory.clear()
        for region in self._regions:
            region.cleanup()
        self.manager.shutdown()

    def __enter__(self) -> TieredEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _region(self, parallel: OffloadingParallelConfig) -> SharedOffloadRegion:
        return SharedOffloadRegion(
            engine_id=self.spec.config.engine_id,
            num_chunks=self.spec.num_chunks,
            rank=parallel.rank,
            kv_bytes_per_chunk=self.spec.kv_bytes_per_chunk,
            cpu_page_size=self.spec.cpu_page_size_per_worker,
        )


def main() -> None:
    asked = json.loads(sys.argv[1])
    with TieredEngine(asked["socket"]) as engine:
        for request, chunks in asked["stored"]:
            engine.store(request, range(chunks))


if __name__ == "__main__":
    main()
