"""LMCache's side: its own benchmark client (`lmcache bench server`'s), one call at a time, driven over standard input.

    python lmcache_client.py RPC_URL HTTP_URL TRANSFER_MODE KVCACHE_SHAPE_SPEC

The client is LMCache's; the loop and the clock are ours, so that both sides can take turns. Where its tool sleeps 50 ms
between two polls of a lookup's status this one does not: a lookup is the request and as many polls as it takes.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import time

import torch
from lmcache.cli.commands.bench.server_bench import helpers
from lmcache.cli.commands.bench.server_bench.client import RequestContext, ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig
from lmcache.cli.commands.bench.server_bench.helpers import _make_key, _poll_prefetch_status, _send_lookup
from serving import serve

REQUEST_TOKENS = 2048
FIRST_PAGE = 128  # LMCache takes page 0 for "no data"
POLLS = 100_000


class Requests:
    """The requests of the contender LMCache (see `kvstored_client`). A lookup takes read locks, so each ends its
    session, outside the clock.
    """

    def __init__(self, rpc_url: str, http_url: str, transfer_mode: str, shape_spec: str) -> None:
        helpers._INSTANCE_ID_BASE = os.getpid()  # two clients of one server are two instances
        config = BenchConfig(
            rpc_url=rpc_url,
            http_url=http_url,
            mode="cpu",
            transfer_mode=transfer_mode,
            tp_size=1,
            use_mla=False,
            num_tokens=REQUEST_TOKENS,
            kvcache_shape_spec=shape_spec,
            num_blocks=512,
            block_size=16,
        )
        self._client = ServerBenchClient(config, lambda text: None)
        self._client.start()
        tensors = list(self._client._workers[0].kv_caches.values())
        self._pages = [tensor[:, FIRST_PAGE : FIRST_PAGE + REQUEST_TOKENS // 16] for tensor in tensors]
        for pages in self._pages:
            pages.copy_(torch.rand(pages.shape))
        self._saved = [pages.clone() for pages in self._pages]
        self._serial = itertools.count()

    def store(self, number: int) -> float:
        request = self._request(number)
        if self._look_up(request) != 0:
            raise RuntimeError(f"request {number} is there already")
        started = time.perf_counter()
        stored = self._client.store(request, 0, request.num_full_tokens)
        elapsed_s = time.perf_counter() - started
        self._client.end_session(request)
        if stored is None or not stored.succeeded:
            raise RuntimeError(f"request {number} was not stored: {stored}")
        return elapsed_s

    def retrieve(self, number: int) -> float:
        request = self._request(number)
        if self._look_up(request) != request.total_chunks:
            raise RuntimeError(f"request {number} is not there")
        for pages in self._pages:
            pages.zero_()
        started = time.perf_counter()
        retrieved = self._client.retrieve(request, 0, request.num_full_tokens)
        elapsed_s = time.perf_counter() - started
        self._client.end_session(request)
        if retrieved is None or not retrieved.succeeded:
            raise RuntimeError(f"request {number} was not retrieved: {retrieved}")
        if not all(map(torch.equal, self._pages, self._saved)):
            raise RuntimeError("the retrieved pages are not what was stored")
        return elapsed_s

    def lookup(self, number: int, times: int) -> list[float]:
        seconds: list[float] = []
        for _ in range(times):
            request = self._request(number)
            key = _make_key(request.token_ids, request.request_id, start=0, end=request.num_full_tokens)
            started = time.perf_counter()
            _send_lookup(self._client._req_client, key)
            found = _poll_prefetch_status(self._client._req_client, key.request_id, POLLS, 0.0)
            seconds.append(time.perf_counter() - started)
            self._client.end_session(request)
            if found != request.total_chunks:
                raise RuntimeError(f"the lookup found {found} of {request.total_chunks} chunks")
        return seconds

    def close(self) -> None:
        self._client.close()

    def _look_up(self, request: RequestContext) -> int:
        return self._client.lookup(request).hit_chunks

    def _request(self, number: int) -> RequestContext:
        made = self._client.create_request(number, f"req-{number}-{next(self._serial)}", "timed")
        assert made is not None
        return dataclasses.replace(made, block_offset=FIRST_PAGE)


if __name__ == "__main__":
    requests = Requests(*sys.argv[1:])
    serve({name: getattr(requests, name) for name in ("store", "retrieve", "lookup")})
    requests.close()
