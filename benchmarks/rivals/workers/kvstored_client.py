"""kvstored's side of every comparison: one client process, driven over standard input.

    python kvstored_client.py SOCKET_DIR

Paged K/V memory is plain arrays of an engine's shape, (2, pages, 16 tokens, 8 heads, 64) float16 for each layer. A
store gathers pages straight into staging, by functions handed to `put`; a retrieve leases and scatters out of arenas.
The connector for vLLM does the copies.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from serving import Batch, Bytes, serve

import kvstore_client
from kvstore_client import Fingerprint, LayerGroup, Lease, Session
from kvstore_connectors.vllm.host_pages import PagedLayers

LAYERS, PAGES, PAGE_TOKENS, HEADS, HEAD_SIZE = 8, 512, 16, 8, 64
REQUEST_TOKENS, BLOCK_TOKENS = 2048, 256  # 8 blocks: what LMCache calls chunks, at its default size
FIRST_PAGE = 128
REQUEST_PAGES = slice(FIRST_PAGE, FIRST_PAGE + REQUEST_TOKENS // PAGE_TOKENS)
STAGING_BYTES = 64 << 20
TOKENS_OF_A_BLOCK = 64  # of the put and get comparison, where a block is just a value


class PagedMemory:
    """The K and V of all layers that an engine would hold, in pages that block tables name."""

    def __init__(self) -> None:
        shape = (2, PAGES, PAGE_TOKENS, HEADS, HEAD_SIZE)
        random = np.random.default_rng(7)
        self.layers = [random.integers(0, 30_000, shape, dtype=np.uint16).view(np.float16) for _ in range(LAYERS)]
        self._pages = [layer.view(np.uint8).reshape(2, PAGES, -1) for layer in self.layers]
        self._saved = [pages[:, REQUEST_PAGES].copy() for pages in self._pages]
        of_a_block = BLOCK_TOKENS // PAGE_TOKENS
        planes = [plane for pages in self._pages for plane in pages]
        self._pool = PagedLayers(
            [plane for plane in planes for _ in range(of_a_block)], list(range(of_a_block)) * len(planes)
        )

    def table(self, block: int) -> tuple[int, ...]:
        """The pages of one block of a request. Consecutive, as in the rival's tool; the copies do not rely on it."""
        pages = BLOCK_TOKENS // PAGE_TOKENS
        return tuple(range(FIRST_PAGE + block * pages, FIRST_PAGE + (block + 1) * pages))

    def gather(self, block: int, destination: Bytes) -> None:
        self._pool.gather(self.table(block), destination)

    def load(self, lease: Lease) -> None:
        load = self._pool.load([(lease, [self.table(block) for block in range(len(lease))])], self._pool.now())
        load.finish()

    def spoil(self) -> None:
        for pages in self._pages:
            pages[:, REQUEST_PAGES] = 0

    def check(self) -> None:
        for pages, saved in zip(self._pages, self._saved, strict=True):
            if not np.array_equal(pages[:, REQUEST_PAGES], saved):
                raise RuntimeError("the retrieved pages are not what was stored")


class Requests:
    """Requests of 2,048 tokens, 32 MiB of K/V, as an engine stores, looks up and retrieves them."""

    def __init__(self, socket_dir: Path) -> None:
        layers = LayerGroup(0, layers=tuple(range(LAYERS)), bytes_per_token_per_layer=2 * HEADS * HEAD_SIZE * 2)
        model = Fingerprint("rivals", "requests", block_tokens=BLOCK_TOKENS, groups=(layers,))
        self._session = _connect(socket_dir, model)
        self._memory = PagedMemory()
        self._blocks = REQUEST_TOKENS // BLOCK_TOKENS

    def store(self, number: int) -> float:
        payloads = [partial(self._memory.gather, block) for block in range(self._blocks)]
        tokens = _tokens(number, REQUEST_TOKENS)
        started = time.perf_counter()
        receipt = self._session.put(tokens, payloads=payloads)
        elapsed_s = time.perf_counter() - started
        if receipt.stored_blocks != self._blocks:
            raise RuntimeError(f"stored {receipt.stored_blocks} of {self._blocks} blocks: {receipt.reason}")
        return elapsed_s

    def retrieve(self, number: int) -> float:
        tokens = _tokens(number, REQUEST_TOKENS)
        self._memory.spoil()
        started = time.perf_counter()
        with self._session.get(tokens) as lease:
            self._memory.load(lease)
            held = len(lease) if lease.valid else 0
        elapsed_s = time.perf_counter() - started
        if held != self._blocks:
            raise RuntimeError(f"retrieved {held} of {self._blocks} blocks: {lease.reason}")
        self._memory.check()
        return elapsed_s

    def lookup(self, number: int, times: int) -> list[float]:
        return self._timed(self._session.lookup, number, times)

    def probe(self, number: int, times: int) -> list[float] | None:
        """The same by the shared-memory index; None where this version has none."""
        probe = getattr(self._session, "probe", None)
        return None if probe is None else self._timed(probe, number, times)

    def _timed(self, ask: object, number: int, times: int) -> list[float]:
        tokens = _tokens(number, REQUEST_TOKENS)
        seconds: list[float] = []
        for _ in range(times):
            started = time.perf_counter()
            found = ask(tokens)  # type: ignore[operator]
            seconds.append(time.perf_counter() - started)
            if found.blocks != self._blocks:
                raise RuntimeError(f"the lookup found {found}")
        return seconds


class Values:
    """Batches of opaque values, each batch a prefix of its own."""

    def __init__(self, socket_dir: Path) -> None:
        self._socket_dir = socket_dir
        self._sessions: dict[int, tuple[Session, Batch]] = {}

    def prepare(self, values: int, value_bytes: int) -> None:
        group = LayerGroup(0, layers=(0,), bytes_per_token_per_layer=value_bytes // TOKENS_OF_A_BLOCK)
        model = Fingerprint("rivals", "values", block_tokens=TOKENS_OF_A_BLOCK, groups=(group,))
        self._sessions[value_bytes] = (_connect(self._socket_dir, model), Batch(values, value_bytes))

    def put(self, number: int, value_bytes: int) -> float:
        session, batch = self._sessions[value_bytes]
        batch.prepare(number)
        tokens = _tokens(number, batch.values * TOKENS_OF_A_BLOCK)
        started = time.perf_counter()
        receipt = session.put(tokens, payloads=list(batch.source))
        elapsed_s = time.perf_counter() - started
        if receipt.stored_blocks != batch.values:
            raise RuntimeError(f"stored {receipt.stored_blocks} of {batch.values} values: {receipt.reason}")
        return elapsed_s

    def get(self, number: int, value_bytes: int) -> float:
        """Copy into memory of the caller's own, as the rivals do, although an engine would read the lease in place."""
        session, batch = self._sessions[value_bytes]
        batch.prepare(number)
        tokens = _tokens(number, batch.values * TOKENS_OF_A_BLOCK)
        targets = list(batch.target)
        started = time.perf_counter()
        with session.get(tokens) as lease:
            copied = lease.copy_into(targets[: len(lease)])
        elapsed_s = time.perf_counter() - started
        if copied != batch.values:
            raise RuntimeError(f"got {copied} of {batch.values} values: {lease.reason}")
        batch.check(number)
        return elapsed_s

    def lease(self, number: int, value_bytes: int) -> float:
        """The same without the copy: 64 views to read in place."""
        session, batch = self._sessions[value_bytes]
        tokens = _tokens(number, batch.values * TOKENS_OF_A_BLOCK)
        started = time.perf_counter()
        with session.get(tokens) as lease:
            views = [lease.payload(value) for value in range(len(lease))]
        elapsed_s = time.perf_counter() - started
        if len(views) != batch.values:
            raise RuntimeError(f"leased {len(views)} of {batch.values} values: {lease.reason}")
        return elapsed_s


def _connect(socket_dir: Path, model: Fingerprint) -> Session:
    patient: dict[str, Any] = {"required": True, "deadline_s": 30.0, "connect_timeout_s": 10.0}
    return kvstore_client.connect(socket_dir, fingerprint=model, staging_bytes=STAGING_BYTES, **patient)


def _tokens(number: int, count: int) -> npt.NDArray[np.int32]:
    """Token ids that no other number shares."""
    return np.arange(count, dtype=np.int32) + number * 1_000_000


if __name__ == "__main__":
    place = Path(sys.argv[1])
    values = Values(place)
    operations = {"prepare": values.prepare, "put": values.put, "get": values.get, "lease": values.lease}
    if sys.argv[2:] == ["requests"]:
        requests = Requests(place)
        operations = {name: getattr(requests, name) for name in ("store", "retrieve", "lookup", "probe")}
    serve(operations)
