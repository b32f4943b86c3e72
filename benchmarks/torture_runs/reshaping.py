"""A kill while a slab gets another slot size: the one place that only a full and emptied tier comes to.

Owns one short history in a directory of its own: fill NVMe with small blocks, delete them all, store large ones until
the failpoint kills, start again, look. Never fills beyond the capacity.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvstore_client import KVStoreError
from torture_runs.figures import Figures
from torture_runs.kill_model import Conversation
from torture_runs.mortal_daemon import MortalDaemon

MIB = 1 << 20
NVME_BYTES = 8 * MIB
SETTINGS = (
    "host.capacity=32MiB", "host.staging=4MiB", "host.arena=2MiB", "host.prefault=false",
    f"nvme.capacity={NVME_BYTES}", "nvme.slab=1MiB", "nvme.io_threads=2", "limits.max_block=1MiB",
)  # fmt: skip
BLOCKS = 15  # of 64 tokens: fewer than 1000 tokens a conversation
SMALL, LARGE = 56, 8  # conversations: the first fill every slab that fits, the second half of the capacity
PATIENCE_S = 5.0
TOGETHER = 8


def killed_while_reshaping(beside: Path, failpoint: str, hit: int, is_forked: bool, figures: Figures) -> bool:
    """Whether the failpoint was reached. What was answered durable after the reshaping began must be there."""
    directory = beside.parent / "reshaping"
    shutil.rmtree(directory, ignore_errors=True)
    large = [Conversation("large", 1, number, BLOCKS) for number in range(LARGE)]
    with MortalDaemon(directory, *SETTINGS) as daemon:
        daemon.is_forked = is_forked
        daemon.start(f"{failpoint}=kill@{hit}")
        _store_delete_store(daemon, large)
        was_reached = daemon.wait_killed(PATIENCE_S)
        daemon.kill9()
        figures.at_least("over_capacity_bytes", max(0, daemon.disk_bytes() - NVME_BYTES))
        daemon.start()
        with daemon.connect(large[0].fingerprint) as session:
            for conversation in large:
                with session.get(conversation.tokens(BLOCKS)) as lease:
                    if len(lease) < conversation.durable_head:
                        figures.fail("durable_lost", f"{failpoint}: {len(lease)} of {conversation.durable_head} blocks")
                    for block in range(len(lease)):
                        if not np.array_equal(lease.payload(block), conversation.payload(block)):
                            figures.fail("wrong_bytes_after_kill", f"{failpoint}: block {block}")
                figures.add("kill_checked_durable", conversation.durable_blocks)
    shutil.rmtree(directory, ignore_errors=True)
    return was_reached


def _store_delete_store(daemon: MortalDaemon, large: list[Conversation]) -> None:
    small = [Conversation("small", 0, number, BLOCKS) for number in range(SMALL)]
    try:
        with daemon.connect(small[0].fingerprint, deadline_s=5.0) as session:
            for wait in ("published", "settled"):  # all are on their way before the first is waited for
                for conversation in small:
                    session.put(conversation.tokens(BLOCKS), payloads=conversation.payloads(BLOCKS), wait=wait)
            with ThreadPoolExecutor(TOGETHER) as threads:  # each delete waits for a commit, which they share so
                list(threads.map(lambda each: session.delete(each.tokens(BLOCKS), deadline_s=5.0), small))
        with daemon.connect(large[0].fingerprint, deadline_s=5.0) as session:
            for conversation in large:
                receipt = session.put(
                    conversation.tokens(BLOCKS), payloads=conversation.payloads(BLOCKS), wait="settled"
                )
                conversation.answered(receipt.durability)
                if session.state != "connected":
                    return
    except KVStoreError:
        return
