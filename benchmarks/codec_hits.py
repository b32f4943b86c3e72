"""Measures the hits of the daemon's store with `codec = "int8"` on its NVMe tier, on a trace, at equal bytes.

A store in this process gets and puts each request's chain of blocks. Without a codec its NVMe tier has room for a fifth
of the distinct blocks. The row's baseline is the simulator's hit ratio with one tier of 1.9 times the blocks that fit
without a codec. Also shown: the store without a codec, with equal bytes and with 1.9 times the bytes. The trace is made
up, unless `--trace` names a file in the format of Mooncake.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from codec_links import MIB, Case, reader
from support.report import AT_LEAST, Row, parser_of, printed, progress
from support.traces import write_chat

from kvstore_proto.arena import slot_bytes
from kvstore_simulator.readers import ReadOptions, read_trace
from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.trace import Trace
from kvstore_tiers.codecs.native import wait_for_library
from kvstore_tiers.testing.kv_blocks import kv_shape
from kvstored.policy_names import LRU

SHAPE = kv_shape(4, 64, 3, 64, "f16")
CASE = Case("hits_int8_equal_bytes", 0, "f16", True, 0.99)
MORE, SHARE, SLAB_BYTES, STAGING_BYTES = 1.9, 1 / 5, 2 * MIB, 8 * MIB
INT8 = ("nvme.codec=int8", "nvme.codec_staging=64MiB")


@dataclass(frozen=True)
class Replayed:
    """The hits of one store on the trace, and how many blocks its NVMe tier held at the end, in how many bytes."""

    hit_ratio: float
    blocks: int
    nbytes: int


async def replayed(trace: Trace, nvme_bytes: int, *settings: str) -> Replayed:
    """Replay `trace` against a store with `nvme_bytes` on NVMe: each request gets its chain, then puts it."""
    host = f"host.capacity={host_bytes(trace)}", f"host.staging={STAGING_BYTES}"
    sizes = *host, f"nvme.capacity={nvme_bytes}", f"nvme.slab={SLAB_BYTES}"
    async with reader(CASE, SHAPE, *sizes, *settings) as store:
        found = 0
        for at in range(trace.requests):
            store.pass_time()
            keys = keys_of(trace, at)
            found += await store.get(keys)
            await store.put(keys)
        nbytes, _ = store.holds()
        return Replayed(found / trace.accesses, store.blocks(), nbytes)


def host_bytes(trace: Trace) -> int:
    """Return the size of DRAM: it has room for the longest request, and is smaller than NVMe, which holds all of it."""
    return STAGING_BYTES + max(160, int(np.diff(trace.starts).max()) * 5 // 4) * slot_bytes(SHAPE.nbytes)


def keys_of(trace: Trace, request: int) -> list[bytes]:
    first, last = trace.starts[request : request + 2].tolist()
    return [trace.key(block) for block in trace.blocks[first:last].tolist()]


def simulated(trace: Trace, blocks: int) -> float:
    """Return the hit ratio of LRU with one tier of `blocks` blocks."""
    return float(Replay(trace, ReplaySettings(LRU, blocks)).run().hits.sum()) / trace.accesses


def rows_of(trace: Trace) -> list[Row]:
    wanted = SHARE * trace.distinct_blocks * slot_bytes(SHAPE.nbytes)
    slabs = round(max(wanted, 1.5 * host_bytes(trace)) / SLAB_BYTES)
    found = {}
    for name, more, settings in (("none", 1.0, ()), ("int8", 1.0, INT8), ("none at 1.9x", MORE, ())):
        found[name] = asyncio.run(replayed(trace, round(more * slabs) * SLAB_BYTES, *settings))
        progress(f"{name}: {found[name]}")
    plain = found["none"].blocks
    expected = simulated(trace, round(MORE * plain))
    percent = {name: 100 * each.hit_ratio for name, each in found.items()}
    return [
        Row(CASE.name, percent["int8"], "%", 100 * expected, "simulator at 1.9x", AT_LEAST, CASE.target),
        Row("hits_none_equal_bytes", percent["none"], "%", 100 * simulated(trace, plain), "simulator"),
        Row("hits_none_more_bytes", percent["none at 1.9x"], "%", 100 * expected, "simulator at 1.9x"),
        Row("blocks_int8_equal_bytes", found["int8"].blocks, "blocks", plain, "codec none"),
    ]


def trace_from(path: Path | None, requests: int) -> Trace:
    """Return the trace at `path`, or one that is made up; its first `requests` requests."""
    with TemporaryDirectory() as folder:
        if path is None:
            path = Path(folder) / "chat.jsonl"
            write_chat(path, requests)
        trace = read_trace(path, "mooncake", ReadOptions(), lambda done, total: None)
    return trace.part(0, min(requests, trace.requests))


def measure(quick: bool, path: Path | None = None) -> list[Row]:
    wait_for_library()
    return rows_of(trace_from(path, 150 if quick else 500))


if __name__ == "__main__":
    parser = parser_of(__doc__ or "")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a trace in the format of Mooncake")
    options = parser.parse_args()
    sys.exit(printed(measure(options.quick, options.trace), as_json=options.json))
