"""A vLLM engine's worker as the connector makes it, with its KV caches on the emulated device, and the steps that vLLM
would have it do: the stream that computes writes and reads the pool.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from kvstore_client import Session
from kvstore_connectors.vllm.orders import LoadOrder, RequestPrefix, SaveOrder, StepOrders
from kvstore_connectors.vllm.saver import Saver
from kvstore_connectors.vllm.tensors import VllmDevicePages, device_pool, kv_tensors
from kvstore_connectors.vllm.worker import VllmWorkerSide
from kvstore_proto.identity import pack_tokens
from tests.gpu.device_engine import POOL_BYTES, allocate
from tests.reference.conversations import LAYERS, TOKENS_A_BLOCK, model, payloads_of, tokens_of
from tests.reference.device_pool import pieces
from tests.reference.vllm_layouts import device_caches, kv_caches

BLOCKS, HEADS = 48, 2
PAGE_BYTES = model().payload_bytes() // LAYERS
SIZES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS_A_BLOCK, "C": PAGE_BYTES // (HEADS * TOKENS_A_BLOCK * 2)}
USED_BYTES = LAYERS * BLOCKS * PAGE_BYTES
PATIENCE_S = 30.0
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


class LeasingSession:
    """The session; `leased` is set when a get has answered."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.leased = threading.Event()
        self.keys, self.put = session.keys, session.put

    def get(self, *arguments: Any, **named: Any) -> Any:
        lease = self._session.get(*arguments, **named)
        self.leased.set()
        return lease


class VllmWorker:
    """`layout`: the order of the axes of the pool in memory, one of vLLM's."""

    def __init__(self, session: Session, layout: str) -> None:
        self.session, self.device = LeasingSession(session), session.device
        self.address = allocate(self.device, POOL_BYTES)
        self.host, self.others = (np.frombuffer(mmap.mmap(-1, POOL_BYTES), np.uint8) for _ in range(2))
        self.others[:] = 0x5A
        memory = self.host[:USED_BYTES].view(np.uint16).reshape([SIZES[axis] for axis in layout])
        self.layers = np.moveaxis(memory, [layout.index("L"), layout.index("B")], [0, 1])
        caches = device_caches(memory, layout, self.address)
        self.pool = device_pool(caches, blocks=BLOCKS, page_bytes=PAGE_BYTES)
        with self.device.current():
            self.stream = self.device.call("cuStreamCreate", 1)
            for buffer in (self.host, self.others):
                self.device.call("cuMemHostRegister", buffer.ctypes.data, POOL_BYTES, 1)
        given = kv_caches(caches, blocks=BLOCKS, page_bytes=PAGE_BYTES)
        tensors = kv_tensors(
            given.tensors, given.vllm_config, given.kv_cache_config, stream_of=lambda device: int(self.stream)
        )
        pages = self.pages = tensors.pages(session)
        assert isinstance(self.pages, VllmDevicePages) and tensors.device == self.device.index
        self.said: list[str] = []
        self.saver = Saver(self.session, pages, deadline_s=PATIENCE_S, say=self.said.append)
        self.side = VllmWorkerSide(self.session, pages, self.saver, reuse_wait_s=PATIENCE_S, say=self.said.append)
        self._random = random.Random(1)
        self._block_ids: list[int] = []

    def obey(self, command: str, *numbers: int) -> dict[str, Any]:
        obeyed: dict[str, Any] = getattr(self, command)(*numbers)
        return obeyed

    def save(self, number: int, blocks: int) -> dict[str, Any]:
        """A step that fills blocks, and one that uses their memory for something else."""
        ids = self._fresh(blocks)
        for block_id, payload in zip(ids, payloads_of(number, blocks, model()), strict=True):
            self.layers[:, block_id] = payload.view(np.uint16).reshape(self.layers[:, 0].shape)
        self._write(self.others)
        self.side.before_step(StepOrders(tokens=1, attended=1.0))
        self._write(self.host)
        self.side.save([SaveOrder("r", self._prefix(number, blocks), 0, tuple(ids))])
        drained = self.saver.drain(PATIENCE_S)
        self.side.before_step(StepOrders(ended=("r",)))
        self._write(self.others)
        return {"drained": drained, "stored": self.saver.stored_blocks, "said": self.said}

    def save_and_reuse(self, number: int, blocks: int) -> dict[str, Any]:
        """The next step comes at once: it queues writes into the same blocks as soon as the connector has let go."""
        ids = self._fresh(blocks)
        for block_id, payload in zip(ids, payloads_of(number, blocks, model()), strict=True):
            self.layers[:, block_id] = payload.view(np.uint16).reshape(self.layers[:, 0].shape)
        self._write(self.host)
        self.side.save([SaveOrder("r", self._prefix(number, blocks), 0, tuple(ids))])
        self.side.before_step(StepOrders(ended=("r",)))
        self._write(self.others)
        return {"drained": self.saver.drain(PATIENCE_S), "stored": self.saver.stored_blocks}

    def load(self, *wanted: int) -> dict[str, Any]:
        """`wanted`: conversation and blocks, in turns, a request for each. Their memory has other uses up to
        the step, which reads each layer as soon as it may."""
        requests = list(zip(wanted[::2], wanted[1::2], strict=True))
        for _ in range(8):
            self._write(self.others)  # takes longer than the load
        orders = self._orders(requests)
        self.side.before_step(StepOrders(tokens=1, attended=1.0, loads=orders))
        self.side.load(orders)
        self._compute()
        self.side.save(())
        self._synchronize()
        failed, report = self.side.take_failed(), self.side.take_report()
        right = all(
            bool((self.layers[:, block_id].reshape(-1) == payload.view(np.uint16)).all())
            for order, (number, blocks) in zip(orders, requests, strict=True)
            for block_id, payload in zip(order.block_ids, payloads_of(number, blocks, model()), strict=True)
            if block_id not in failed
        )
        loaded = [load.blocks for load in report.loads] if report is not None else []
        return {"loaded": loaded, "failed": sorted(map(self._block_ids.index, failed)), "right": right}

    def begin(self, number: int, blocks: int) -> dict[str, Any]:
        """A load that has its lease, and whose copies cannot begin: others use their stream."""
        orders = self._orders([(number, blocks)])
        self.pages.loads.resources.using.acquire()
        self.session.leased.clear()
        self.side.before_step(StepOrders(tokens=1, attended=1.0, loads=orders))
        self.side.load(orders)
        return {"leased": self.session.leased.wait(PATIENCE_S)}

    def end(self) -> dict[str, Any]:
        """The copies of that load, and the step."""
        self.pages.loads.resources.using.release()
        self._compute()
        self.side.save([SaveOrder("r", self._prefix(9, len(self._block_ids)), 0, tuple(self._block_ids))])
        self._synchronize()
        failed = self.side.take_failed()
        self.saver.drain(PATIENCE_S)
        tried = self.saver.stored_blocks + self.saver.dropped_blocks
        return {"failed": sorted(map(self._block_ids.index, failed)), "tried": tried, "said": self.said}

    def queue(self, number: int, blocks: int) -> dict[str, Any]:
        """A load's first layer, and nothing else on the engine's stream."""
        orders = self._orders([(number, blocks)])
        self.side.before_step(StepOrders(tokens=1, attended=1.0, loads=orders))
        self._synchronize()
        self.side.load(orders)
        self.side.wait_layer(0)
        with self.device.current():
            (code,) = self.device.driver.cuStreamQuery(self.stream)
        return {"waits": int(code) == _NOT_READY}

    def reach(self, number: int, blocks: int) -> dict[str, Any]:
        """A load's first layer, behind work of the engine: whether all copies have ended then, and what failed."""
        for _ in range(8):
            self._write(self.others)
        orders = self._orders([(number, blocks)])
        self.side.before_step(StepOrders(tokens=1, attended=1.0, loads=orders))
        self.side.load(orders)
        self.side.wait_layer(0)
        with self.device.current():
            (code,) = self.device.driver.cuStreamQuery(self.pages.loads.resources.stream.handle)
        self.side.save(())
        return {"ended": int(code) == 0, "failed": sorted(map(self._block_ids.index, self.side.take_failed()))}

    def steps(self, count: int) -> dict[str, Any]:
        """Return the reports of a number of steps without loads, each of another number of tokens."""
        reports = []
        for step in range(1, count + 1):
            self.side.before_step(StepOrders(tokens=step, attended=float(step)))
            self._write(self.others)
            self.side.save(())
            self._synchronize()
            report = self.side.take_report()
            reports.append(None if report is None else [report.tokens, report.compute_s > 0])
        return {"reports": reports}

    def register(self) -> dict[str, Any]:
        return {"settled": all(each.registered.settle(PATIENCE_S) for each in (self.pages.loads, self.pages.stores))}

    def close(self) -> dict[str, Any]:
        return {"done": self.side.close(PATIENCE_S)}

    def _orders(self, requests: Sequence[tuple[int, int]]) -> tuple[LoadOrder, ...]:
        ids = iter(self._fresh(sum(blocks for _, blocks in requests)))
        return tuple(
            LoadOrder(f"r{number}", self._prefix(number, blocks), 0, tuple(islice(ids, blocks)), PATIENCE_S)
            for number, blocks in requests
        )

    def _fresh(self, blocks: int) -> list[int]:
        self._block_ids = self._random.sample(range(BLOCKS), blocks)
        return self._block_ids

    def _prefix(self, number: int, blocks: int) -> RequestPrefix:
        return RequestPrefix(pack_tokens(tokens_of(number, blocks)))

    def _compute(self) -> None:
        """Read the blocks of a layer once it may be read, into host memory, on the engine's stream."""
        self.host[:] = 0
        for layer in range(LAYERS):
            self.side.wait_layer(layer)
            for block_id in self._block_ids:
                for piece in pieces(self.pool, layer, block_id):
                    to = self.host.ctypes.data + piece.address - self.address
                    with self.device.current():
                        place = self.device.driver.CUdeviceptr(piece.address)
                        self.device.call("cuMemcpyDtoHAsync", to, place, piece.nbytes, self.stream)

    def _write(self, source: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """All of the pool, on the engine's stream."""
        with self.device.current():
            place = self.device.driver.CUdeviceptr(self.address)
            self.device.call("cuMemcpyHtoDAsync", place, source.ctypes.data, USED_BYTES, self.stream)

    def _synchronize(self) -> None:
        with self.device.current():
            self.device.call("cuStreamSynchronize", self.stream)
