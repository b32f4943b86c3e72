"""LMCache's side of the torture comparison: store and read requests whose bytes name them, over a server that dies.

    python lmcache_torture_client.py KVCACHE_SHAPE_SPEC REQUEST_TOKENS

Driven by JSON lines (`serving.py`). The client is LMCache's own benchmark client, made anew by `connect` after each
start of the server. Each chunk of each request has bytes of its own, so that a chunk in another's place is seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys

import torch
from lmcache.cli.commands.bench.server_bench import helpers
from lmcache.cli.commands.bench.server_bench.client import RequestContext, ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig
from serving import serve

FIRST_PAGE = 128  # LMCache takes page 0 for "no data"
PAGE_TOKENS = 16
RPC_TIMEOUT_S = 3.0  # of a server that was killed


class Requests:
    """`store` and `read` by number; what was promised is remembered by the caller."""

    def __init__(self, shape_spec: str, request_tokens: str) -> None:
        helpers._DEFAULT_RPC_TIMEOUT_S = RPC_TIMEOUT_S
        helpers._wait_for_result.__defaults__ = (RPC_TIMEOUT_S, ())
        self._shape_spec, self._tokens = shape_spec, int(request_tokens)
        self._client: ServerBenchClient | None = None
        self._serial = itertools.count()

    def connect(self, rpc_url: str, http_url: str) -> bool:
        """Connect to a server that has just started, after closing an earlier connection."""
        self.disconnect()
        helpers._INSTANCE_ID_BASE = os.getpid() + 100_000 * next(self._serial)
        config = BenchConfig(
            rpc_url=rpc_url, http_url=http_url, mode="cpu", transfer_mode="engine_driven", tp_size=1, use_mla=False,
            num_tokens=self._tokens, kvcache_shape_spec=self._shape_spec, num_blocks=256, block_size=PAGE_TOKENS,
        )  # fmt: skip
        client = ServerBenchClient(config, lambda text: None)
        client.start()
        self._client = client
        pages = self._tokens // PAGE_TOKENS
        tensors = client._workers[0].kv_caches.values()
        self._pages = [tensor[:, FIRST_PAGE : FIRST_PAGE + pages] for tensor in tensors]
        return True

    def disconnect(self) -> bool:
        if self._client is not None:
            with contextlib.suppress(Exception):
                self._client.close()
            self._client = None
        return True

    def store(self, number: int) -> bool:
        """Whether the server said that it is stored."""
        assert self._client is not None
        request = self._request(number)
        for pages, wanted in zip(self._pages, self._contents(number), strict=True):
            pages.copy_(wanted)
        if self._client.lookup(request).error:
            return False
        stored = self._client.store(request, 0, request.num_full_tokens)
        self._client.end_session(request)
        return stored is not None and stored.succeeded

    def read(self, number: int) -> dict[str, int]:
        """Chunks that were found, chunks that came back, and how many of those have other bytes."""
        assert self._client is not None
        request = self._request(number)
        found = self._client.lookup(request).hit_chunks
        for pages in self._pages:
            pages.zero_()
        served = 0
        if found:
            retrieved = self._client.retrieve(request, 0, found * request.chunk_size)
            served = found if retrieved is not None and retrieved.succeeded else 0
        self._client.end_session(request)
        per_chunk = request.chunk_size // PAGE_TOKENS
        wrong = 0
        for chunk in range(served):
            part = slice(chunk * per_chunk, (chunk + 1) * per_chunk)
            pairs = zip(self._pages, self._contents(number), strict=True)
            wrong += not all(
                torch.equal(pages[:, part].view(torch.uint8), want[:, part].view(torch.uint8)) for pages, want in pairs
            )
        return {"found": found, "served": served, "wrong": wrong}

    def close(self) -> None:
        self.disconnect()

    def _contents(self, number: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return [torch.rand(pages.shape, generator=generator).to(pages.dtype) for pages in self._pages]

    def _request(self, number: int) -> RequestContext:
        assert self._client is not None
        made = self._client.create_request(number, f"req-{number}-{next(self._serial)}", "torture")
        assert made is not None
        return dataclasses.replace(made, block_offset=FIRST_PAGE)


if __name__ == "__main__":
    requests = Requests(*sys.argv[1:])
    serve({name: getattr(requests, name) for name in ("connect", "disconnect", "store", "read")})
    requests.close()
