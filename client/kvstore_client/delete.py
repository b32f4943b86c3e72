"""Deletion of blocks, in as many requests as the daemon's limit of keys takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from kvstore_client.prefix import Prefix
from kvstore_client.results import Deleted
from kvstore_proto.v1 import kvstore_pb2 as wire


def delete(prefix: Prefix, deadline_s: float, *, clock: Callable[[], float] = time.monotonic) -> Deleted:
    """Delete from the end, so that no request leaves a hole. Stops at the first one without an answer."""
    daemon, keys = prefix.daemon, prefix.chain.keys
    total, until = Deleted(), clock() + deadline_s
    for end in range(len(keys), 0, -daemon.max_keys):
        part = keys[max(0, end - daemon.max_keys) : end]
        answer = daemon.call(wire.Request(delete=wire.Delete(set=prefix.key_set(part))), max(until - clock(), 0.001))
        if isinstance(answer, str):
            return replace(total, reason=answer)
        reply = answer.delete
        total = Deleted(
            total.blocks + reply.deleted,
            total.payload_bytes + reply.deleted_bytes,
            total.leased + reply.leased,
            total.continued + reply.continued,
            total.missing + reply.missing,
        )
    return total
