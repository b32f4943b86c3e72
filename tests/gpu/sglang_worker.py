"""One rank of an SGLang server, as far as a linker meets it: device pools, streams, and the order of SGLang's calls.

    python -m tests.gpu.sglang_worker SOCKET_DIR      then a line of JSON in for each line out

SGLang's factory makes the linker, and SGLang's classes describe the pools, whose memory is the emulated driver's. The
first line out is {"ready": true}, or {"missing": why} where SGLang cannot be imported.
Commands: ["open", kind, draft model] (a linker over new pools, instead of the one before: "mha", "hnd", "mla", "swa",
"draft", or "dsa" with packed layers of a draft), ["offload", conversation, pages], ["chunk", conversation, first, end]
(pages of it that follow others), ["lookup", conversation, pages], ["restore", conversation, pages] (into other device
pages; looks at the bytes of each layer as soon as it may), ["queue", conversation, pages] (a load that is not started),
["spoilt", conversation, pages] (the same, with a page of the last pool that has no name), ["cancel"], ["reset"],
["close"].
"""

from __future__ import annotations

import hashlib
import json
import mmap
import random
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore_client.device import DeviceMemory
from tests.gpu.device_engine import allocate
from tests.reference.running_daemon import eventually
from tests.reference.sglang_storage import import_sglang_pools

PAGE, PAGES, LAYERS, HEADS, WIDTH, WINDOW = 16, 40, 3, 2, 8, 2
MEMORY_BYTES = 4 << 20


@dataclass(frozen=True)
class DeviceTensor:
    """The part of a CUDA tensor that describes its memory: [rows, ...] of two bytes each, without gaps."""

    address: int
    shape: tuple[int, ...]
    dtype: Any
    device: Any

    @property
    def nbytes(self) -> int:
        return 2 * int(np.prod(self.shape))

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return 2

    def stride(self, _: int) -> int:
        return int(np.prod(self.shape[1:]))


class Streams:
    """The stand-in for `torch.cuda` that a linker gets, over the driver: events of one stream, which is the current
    one.
    """

    def __init__(self, device: DeviceMemory) -> None:
        self.device = device
        with device.current():
            self.handle = device.call("cuStreamCreate", 1)

    def current_stream(self) -> Any:
        return SimpleNamespace(cuda_stream=int(self.handle))

    def Event(self) -> Event:  # noqa: N802  # torch's name
        return Event(self)


class Event:
    def __init__(self, streams: Streams) -> None:
        self._streams, device = streams, streams.device
        with device.current():
            self._handle = device.call("cuEventCreate", 2)

    def record(self, stream: Any = None) -> None:
        with self._streams.device.current():
            self._streams.device.call("cuEventRecord", self._handle, self._streams.handle)

    def synchronize(self) -> None:
        with self._streams.device.current():
            self._streams.device.call("cuEventSynchronize", self._handle)


class Worker:
    def __init__(self, socket_dir: str) -> None:
        import torch
        from sglang.srt.mem_cache.unified_cache import unified_cache_linker

        self.torch, self.socket_dir = torch, socket_dir
        self.device = DeviceMemory(0)
        self.streams = Streams(self.device)
        self._used, self._address = 0, allocate(self.device, MEMORY_BYTES)
        self._random, self.linker = random.Random(1), None
        self.mirror = np.frombuffer(mmap.mmap(-1, MEMORY_BYTES), np.uint8)
        self._mirror_address: int = self.mirror.__array_interface__["data"][0]
        with self.device.current():
            self.device.call("cuMemHostRegister", self._mirror_address, MEMORY_BYTES, 1)
        unified_cache_linker.device_module = torch.cuda
        torch.cuda.current_stream, torch.cuda.Event = self.streams.current_stream, self.streams.Event

    def open(self, kind: str, draft: str | None = None) -> dict[str, Any]:
        from sglang.srt.mem_cache.unified_cache import linker_factory
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        if self.linker is not None:
            self.linker.close()
        self._used = 0
        config = {
            "linker": "KVStoreLinker", "linker_module_path": "kvstore_connectors.sglang",
            "linker_extra_config": {"socket": self.socket_dir, "staging_bytes": 1 << 18, "deadline_s": 30.0},
        }  # fmt: skip
        components = {ComponentType.FULL} | ({ComponentType.SWA} if kind == "swa" else set())
        self.linker = linker_factory.create_unified_cache_linker(
            SimpleNamespace(model_path="model", speculative_draft_model_path=draft), self._params(kind),
            backend="dynamic", config=config,
            components=components, forward_stream=SimpleNamespace(cuda_stream=int(self.streams.handle)),
        )  # fmt: skip
        return {"pools": sorted(map(str, self.linker.pools))}

    # The pools

    def _tensor(self, *shape: int) -> DeviceTensor:
        tensor = DeviceTensor(
            self._address + self._used, shape, self.torch.bfloat16, SimpleNamespace(index=self.device.index)
        )
        self._used += tensor.nbytes
        assert self._used <= MEMORY_BYTES
        return tensor

    def _params(self, kind: str) -> Any:
        makers = {"mla": self._mla, "dsa": self._dsa, "swa": self._swa}
        pool = makers.get(kind, lambda: self._mha("hnd" if kind == "hnd" else "nhd"))()
        params = {"tp_cache_group": None, "attn_cp_cache_group": None, "attn_tp_cache_group": None}
        return SimpleNamespace(
            page_size=PAGE, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, **params,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
            mtp_draft_device_pools=(self._dsa(layers=1),) if kind == "dsa" else (),
            sidecar_draft_device_pools=(self._mha("nhd", layers=1),) if kind == "draft" else (),
        )  # fmt: skip

    def _mha(self, layout: str, layers: int = LAYERS) -> Any:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        shape = (PAGES * PAGE, HEADS, WIDTH) if layout == "nhd" else (PAGES, HEADS, PAGE, WIDTH)
        return _made(
            MHATokenToKVPool, page_size=PAGE, layer_num=layers, start_layer=0, kv_cache_layout=layout,
            k_scale_buffer=None, k_buffer=[self._tensor(*shape) for _ in range(layers)],
            v_buffer=[self._tensor(*shape) for _ in range(layers)],
        )  # fmt: skip

    def _mla(self) -> Any:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        buffers = [self._tensor(PAGES * PAGE, 1, WIDTH) for _ in range(LAYERS)]
        return _made(MLATokenToKVPool, page_size=PAGE, layer_num=LAYERS, kv_scale_buffer=None, kv_buffer=buffers)

    def _dsa(self, layers: int = LAYERS) -> Any:
        from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

        return _made(
            DSATokenToKVPool, page_size=PAGE, layer_num=layers,
            kv_buffer=[self._tensor(PAGES * PAGE, 1, WIDTH) for _ in range(layers)],
            index_key_cache=SimpleNamespace(buffer=[self._tensor(PAGES, PAGE * 4) for _ in range(layers)]),
        )  # fmt: skip

    def _swa(self) -> Any:
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        mapping = {0: (0, False), 1: (0, True), 2: (1, False), 3: (1, True)}
        return _made(
            SWAKVPool, full_kv_pool=self._mha("nhd", 2), swa_kv_pool=self._mha("nhd", 2), layers_mapping=mapping,
            start_layer=0, page_size=PAGE,
        )  # fmt: skip

    # Commands

    def offload(self, conversation: int, pages: int) -> dict[str, Any]:
        return self.chunk(conversation, 0, pages)

    def chunk(self, conversation: int, first: int, end: int) -> dict[str, Any]:
        """Write pages as a forward does: they are written on the forward's stream, and offloaded at once."""
        hashes = hashes_of(conversation, end)[first:]
        transfers, places = self._transfers(hashes, "offload")
        self._write(places)
        assert self.linker.offload(transfers)
        assert eventually(lambda: self.linker.num_completed_offloads() > 0)
        return {"stored": self.linker.pop_completed_offload()}

    def lookup(self, conversation: int, pages: int) -> dict[str, Any]:
        transfers, _ = self._transfers(hashes_of(conversation, pages), "lookup")
        return {"lengths": self.linker.lookup("request", transfers)}

    def queue(self, conversation: int, pages: int) -> dict[str, Any]:
        transfers, _ = self._transfers(hashes_of(conversation, pages), "load")
        return {"queued": self.linker.load("request", transfers)}

    def spoilt(self, conversation: int, pages: int) -> dict[str, Any]:
        transfers, _ = self._transfers(hashes_of(conversation, pages), "load")
        transfers[-1].keys[-1] = None
        return {"queued": self.linker.load("request", transfers)}

    def cancel(self) -> dict[str, Any]:
        return {"cancelled": self.linker.cancel_queued_load("request"), "index": self.linker.start_layer_wise_loading()}

    def restore(self, conversation: int, pages: int) -> dict[str, Any]:
        """Two requests of one batch: each has a half of the pages."""
        hashes = hashes_of(conversation, pages)
        halves = [hashes[: pages // 2], hashes[pages // 2 :]] if pages > 1 else [hashes]
        places: list[tuple[str, str, int]] = []
        for number, half in enumerate(halves):
            transfers, placed = self._transfers(half, "load", taken=places)
            if not self.linker.load(f"request {number}", transfers):
                self.linker.reset()
                return {"loaded": False}
            places += placed
        self.mirror[:] = 0x5A  # what had these pages before is still at work when the load is started
        self._copy("cuMemcpyHtoDAsync", range(self.linker.layer_done_counter.num_layers))
        counter = self.linker.layer_done_counter
        index = self.linker.start_layer_wise_loading()
        counter.set_consumer(index)
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
            self._copy("cuMemcpyDtoHAsync", [layer])
        landed = self.linker.finish_layer_wise_loading(index)
        self._synchronize()
        right = all(
            bool((self._mirrored(tensor, page) == content(page_hash, pool, at, tensor)).all())
            for pool, page_hash, page in places
            for at, tensor in enumerate(self.linker.pools[pool].kv_buffer)
        )
        return {"loaded": True, "landed": landed, "right": right}

    def reset(self) -> dict[str, Any]:
        self.linker.reset()
        return {}

    def close(self) -> dict[str, Any]:
        self.linker.close()
        return {}

    # Pages

    def _transfers(
        self, hashes: list[str], phase: str, taken: list[tuple[str, str, int]] | None = None
    ) -> tuple[list[Any], list[tuple[str, str, int]]]:
        """Return transfers as the tree's components make them; and for each physical pool which page is to be where."""
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        logical = [(PoolName.KV, hashes, PoolHitPolicy.ALL_PAGES)]
        if PoolName.SWA in self.linker.pools:
            kept = hashes if phase == "offload" else hashes[-WINDOW:]
            logical.append((PoolName.SWA, kept, PoolHitPolicy.TRAILING_PAGES))
        transfers, places = [], []
        for name, keys, policy in logical:
            used = {page for pool, _, page in taken or [] if self.linker.pools[pool].indices_from_pool == name}
            free = [page for page in range(1, PAGES) if page not in used]
            pages = self._random.sample(free, len(keys))
            indices = self.torch.cat([self.torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])
            transfers.append(
                PoolTransfer(
                    name=name,
                    keys=list(keys),
                    hit_policy=policy,
                    device_indices=None if phase == "lookup" else indices,
                )
            )
            for pool, entry in self.linker.pools.items():
                if entry.indices_from_pool == name:
                    places += [(str(pool), key, page) for key, page in zip(keys, pages, strict=True)]
        return transfers, places

    def _write(self, places: list[tuple[str, str, int]]) -> None:
        for pool, page_hash, page in places:
            for at, tensor in enumerate(self.linker.pools[pool].kv_buffer):
                self._mirrored(tensor, page)[:] = content(page_hash, pool, at, tensor)
        self._copy("cuMemcpyHtoDAsync", range(self.linker.layer_done_counter.num_layers))

    def _mirrored(self, tensor: DeviceTensor, page: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        nbytes = tensor.nbytes // PAGES
        start = tensor.address - self._address + page * nbytes
        return self.mirror[start : start + nbytes]

    def _copy(self, call: str, layers: Any) -> None:
        """All pages of these layers of the model, in all pools, on the forward's stream."""
        for entry in self.linker.pools.values():
            for layer in layers:
                mapped = entry.layer_mapping.get(layer, ())
                for index in [mapped] if isinstance(mapped, int) else mapped:
                    tensor = entry.kv_buffer[index]
                    host = self._mirror_address + tensor.address - self._address
                    place = self.device.driver.CUdeviceptr(tensor.address)
                    ends = (place, host) if call == "cuMemcpyHtoDAsync" else (host, place)
                    with self.device.current():
                        self.device.call(call, *ends, tensor.nbytes, self.streams.handle)

    def _synchronize(self) -> None:
        with self.device.current():
            self.device.call("cuStreamSynchronize", self.streams.handle)


def _made(kind: Any, **fields: Any) -> Any:
    """One of SGLang's pools with these buffers: its own constructor allocates on a GPU."""
    pool = object.__new__(kind)
    pool.__dict__.update(fields, dtype="bfloat16")
    return pool


def hashes_of(conversation: int, pages: int) -> list[str]:
    """Chained, as SGLang's."""
    hashes: list[str] = []
    for page in range(pages):
        text = f"{hashes[-1] if hashes else ''}/{conversation}/{page}"
        hashes.append(hashlib.sha256(text.encode()).hexdigest())
    return hashes


def content(page_hash: str, pool: str, at: int, tensor: DeviceTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    seed = int.from_bytes(hashlib.sha256(f"{page_hash}/{pool}/{at}".encode()).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, tensor.nbytes // PAGES, np.uint8)


def main(socket_dir: str) -> None:
    try:
        import_sglang_pools()
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    worker = Worker(socket_dir)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
