"""Measures a get of 64 blocks of 1 MiB: by lease, and copied out into memory of the caller's own.

A lease moves no bytes: one message, 64 headers verified in place, 64 views. Baseline of the copy: memcpy of as many
bytes between arrays of this process, touched before, block by block, interleaved.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
from support.daemon import MIB, Bytes, bench_daemon, model, payloads, tokens_of, wait_mapped
from support.report import AT_LEAST, Row, main, median, percentile, progress, time_each, time_once, within

from kvstore_proto.arena import HEADER_BYTES

BLOCKS = 64
SMALL_BLOCK_BYTES = 4096
SETTLE_S, DURABLE_S, SETTLED_S = 0.01, 0.15, 1.0
SETTINGS = ("host.capacity=256MiB", "nvme.enabled=false", "host.prefault_ahead=192MiB")


def measure(quick: bool) -> list[Row]:
    data = payloads(BLOCKS, MIB)
    own = [block.copy() for block in data]  # both sides copy into the same touched memory
    tokens = tokens_of(1, BLOCKS)
    leases: list[float] = []
    copies: list[float] = []
    plain: list[float] = []
    with bench_daemon(*SETTINGS) as daemon, daemon.connect(model(MIB)) as session:
        if session.put(tokens, payloads=data).stored_blocks != BLOCKS:
            raise RuntimeError("the blocks were not stored")

        def lease_only() -> None:
            with session.get(tokens) as lease:
                assert len(lease) == BLOCKS and lease.payload(BLOCKS - 1)[0] == data[-1][0]

        def copy_out() -> None:
            with session.get(tokens) as lease:
                assert lease.copy_into(own) == BLOCKS

        progress(f"first copy, arenas not yet in this process's page table: {time_once(copy_out) * 1e3:.1f} ms")
        for _ in range(3 if quick else 12):
            leases += time_each(lease_only, 25)
            copies += time_each(copy_out, 2)
            plain += time_each(lambda: _memcpy(own, data), 2)
    progress(f"get by lease p99 {percentile(leases, 99) * 1e3:.2f} ms")
    gb = BLOCKS * MIB / 1e9
    put_us, get_us, lookup_us = _processor_us(10 if quick else 60)
    same = "lookup of the same keys"
    return [
        within("get_64mib_lease_p50", median(leases) * 1e3, "ms", 1.0),
        Row("get_64mib_copied_out", gb / median(copies), "GB/s", gb / median(plain), "memcpy", AT_LEAST, 0.75),
        Row("put_64_small_processor", put_us, "us", lookup_us, same),
        Row("get_64_small_processor", get_us, "us", lookup_us, same),
        *(Row(f"{what}_64_nvme_processor", us, "us", lookup_us, same) for what, us in _nvme_us(8 if quick else 40)),
        *(Row(f"{what}_processor", us, "us", lookup_us, same) for what, us in _full_us(8 if quick else 40)),
    ]


def _full_us(rounds: int) -> list[tuple[str, float]]:
    """Return that time where memory is full of blocks that NVMe has too, so that a block leaves for each that comes:
    for a put, for a get that brings blocks back from NVMe, and for a put while NVMe is full as well."""
    data, used = (
        payloads(BLOCKS, SMALL_BLOCK_BYTES),
        dict[str, list[float]](put_64_full=[], get_64_full=[], put_64_both_full=[]),
    )
    in_memory = 64 * MIB // (BLOCKS * (SMALL_BLOCK_BYTES + HEADER_BYTES))
    for nvme, filled in (("1GiB", 2 * in_memory), ("128MiB", 3 * in_memory)):
        settings = ("host.capacity=64MiB", f"nvme.capacity={nvme}")
        with bench_daemon(*settings) as daemon, daemon.connect(model(SMALL_BLOCK_BYTES)) as session:
            wait_mapped()

            def put(number: int) -> None:
                session.put(tokens_of(number, BLOCKS), payloads=data)  # called at once

            def get(number: int) -> None:
                session.get(tokens_of(number, BLOCKS)).release()

            def measure_once(what: str, action: Callable[[int], None], number: int) -> None:
                before_s = daemon.control_s()
                action(number)
                time.sleep(DURABLE_S)
                used[what].append((daemon.control_s() - before_s) * 1e6)

            for number in range(filled):
                put(number)
            time.sleep(SETTLED_S)
            for number in range(rounds):
                if nvme == "1GiB":
                    measure_once("put_64_full", put, filled + number)
                    measure_once("get_64_full", get, number)
                else:
                    measure_once("put_64_both_full", put, filled + number)
    return [(what, min(times)) for what, times in used.items()]


def _nvme_us(rounds: int) -> list[tuple[str, float]]:
    """Return that time for a put of blocks that go to NVMe too, and for a get that brings them back from there."""
    data, used = payloads(BLOCKS, SMALL_BLOCK_BYTES), dict[str, list[float]](put=[], get=[])
    with bench_daemon(SETTINGS[0], "nvme.capacity=1GiB") as daemon, daemon.connect(model(SMALL_BLOCK_BYTES)) as session:
        wait_mapped()

        def measure_once(what: str, action: Callable[[], object]) -> None:
            before_s = daemon.control_s()
            action()
            time.sleep(DURABLE_S)
            used[what].append((daemon.control_s() - before_s) * 1e6)

        for number in range(rounds):
            tokens = tokens_of(number, BLOCKS)
            measure_once("put", partial(session.put, tokens, payloads=data))
            daemon.drop_host()
            measure_once("get", lambda: session.get(tokens).release())  # noqa: B023  # called at once
    return [(what, min(times)) for what, times in used.items()]


def _processor_us(rounds: int) -> list[float]:
    """Return the daemon's processor time, in microseconds, for a put, a get and a lookup of small blocks."""
    data = payloads(BLOCKS, SMALL_BLOCK_BYTES)
    used: list[list[float]] = [[], [], []]
    with bench_daemon(*SETTINGS[:2]) as daemon, daemon.connect(model(SMALL_BLOCK_BYTES)) as session:
        wait_mapped()

        def get(tokens: npt.NDArray[np.int32]) -> None:
            session.get(tokens).release()

        for number in range(rounds):
            tokens = tokens_of(number, BLOCKS)
            put = partial(session.put, payloads=data)
            for times, action in zip(used, (put, get, session.lookup), strict=True):
                before_s = daemon.control_s()
                action(tokens)
                time.sleep(SETTLE_S)  # the policy hears of it once the answer is on its way, and the lease is released
                times.append((daemon.control_s() - before_s) * 1e6)
    return [min(times) for times in used]


def _memcpy(destinations: list[Bytes], sources: list[Bytes]) -> None:
    for destination, source in zip(destinations, sources, strict=True):
        np.copyto(destination, source)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
