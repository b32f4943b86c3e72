"""vLLM's tiered offloading in an engine on CPUs: the copy between device and CPU tier is a plain copy in host memory.

vLLM refuses `TieringOffloadingSpec.get_worker` on platforms without a device ("CPU Offloading is currently only
supported on CUDA-alike and XPU GPUs"), and its worker copies by CUDA streams. Owns the one thing put in their place.
Scheduler, connector, manager, primary tier, shared memory and our tier are the real ones. `blocks_per_chunk` is 1.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not typed where this is checked
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return HostWorker(kv_caches, region)


class HostWorker(OffloadingWorker):  # type: ignore[misc]  # as above
    """Copies at once; a transfer has ended when it was submitted."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._groups = kv_caches.group_data_refs
        self._blocks = [tensor.tensor.view(torch.int8).view(-1, tensor.page_size_bytes) for tensor in kv_caches.tensors]
        self._rows = [region.create_next_worker_view(tensor.page_size_bytes) for tensor in kv_caches.tensors]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_rows=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_rows=False)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, device: GPULoadStoreSpec, host: Any, *, to_rows: bool) -> bool:
        blocks, rows, at, nbytes = device.block_ids, host.block_ids, 0, 0
        for group, size in enumerate(device.group_sizes):
            for block, row in zip(blocks[at : at + size], rows[at : at + size], strict=True):
                for ref in self._groups[group]:
                    pool = self._blocks[ref.tensor_idx][block]
                    kept = self._rows[ref.tensor_idx][row]
                    source, target = (pool, kept) if to_rows else (kept, pool)
                    target[: ref.page_size_bytes].copy_(source[: ref.page_size_bytes])
                    nbytes += ref.page_size_bytes
            at += size
        self._ended.append(TransferResult(job_id=job_id, success=True, transfer_size=nbytes, transfer_time=1e-6))
        return True
