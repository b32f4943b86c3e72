"""redis's side: redis-py with the hiredis parser over a Unix socket, MSET and MGET of a whole batch.

    python redis_client.py SOCKET {multi|pipeline}

A got value is the bytes object that redis-py hands out: memory of the caller's own, so no copy is added to it. Values
go out of and come into the batch's arrays as memoryviews, without a copy before the socket. `pipeline` sends 64 SET or
GET in one pipeline instead, which redis documents for large values.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import redis
from serving import Batch, serve


class Values:
    """The values of the contender redis (see `kvstored_client`)."""

    def __init__(self, path: str, style: str) -> None:
        self._redis = redis.Redis(unix_socket_path=path)
        self._pipelined = style == "pipeline"
        self._batches: dict[int, Batch] = {}

    def prepare(self, values: int, value_bytes: int) -> None:
        self._batches[value_bytes] = Batch(values, value_bytes)

    def put(self, number: int, value_bytes: int) -> float:
        batch = self._batches[value_bytes]
        batch.prepare(number)
        named = {name: row.data for name, row in zip(batch.names(number), batch.source, strict=True)}
        started = time.perf_counter()
        if self._pipelined:
            pipeline = self._redis.pipeline(transaction=False)
            for name, value in named.items():
                pipeline.set(name, value)
            stored = all(pipeline.execute())
        else:
            stored = bool(self._redis.mset(named))
        elapsed_s = time.perf_counter() - started
        if not stored:
            raise RuntimeError(f"batch {number} was not stored")
        return elapsed_s

    def get(self, number: int, value_bytes: int) -> float:
        batch = self._batches[value_bytes]
        batch.prepare(number)
        names = batch.names(number)
        started = time.perf_counter()
        if self._pipelined:
            pipeline = self._redis.pipeline(transaction=False)
            for name in names:
                pipeline.get(name)
            got = pipeline.execute()
        else:
            got = self._redis.mget(names)
        elapsed_s = time.perf_counter() - started
        for value, row in zip(got, batch.target, strict=True):
            row[:] = np.frombuffer(value, np.uint8)
        batch.check(number)
        return elapsed_s

    def forget(self, number: int, value_bytes: int) -> None:
        self._redis.delete(*self._batches[value_bytes].names(number))


if __name__ == "__main__":
    values = Values(*sys.argv[1:])
    serve({name: getattr(values, name) for name in ("prepare", "put", "get", "forget")})
