"""Warm restart: how many blocks of DRAM are still there, and right, after kill -9 and a new start.

Owns rounds of: put blocks that NVMe is not given (`durability="none"`) and some that it is, count what DRAM holds,
kill, start, read everything back. Counts what a client gets, not what the daemon says of itself: the blocks after the
restart are the blocks that came out of DRAM without a promotion, with the right bytes. What keeps the memory over the
restart is the daemon's own business (`SETTINGS`); where nothing does, the count after is what it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torture_runs.figures import Assignment, Clock, Figures
from torture_runs.kill_model import Conversation
from torture_runs.mortal_daemon import DaemonFailed, MortalDaemon

SETTINGS = (
    "host.capacity=96MiB", "host.staging=8MiB", "host.arena=4MiB", "nvme.capacity=32MiB", "nvme.slab=4MiB",
    "nvme.io_threads=2", "limits.max_block=1MiB",
)  # fmt: skip
BLOCKS = 15
CONVERSATIONS = 24
DURABLE_EVERY = 4


def torture(assignment: Assignment, figures: Figures) -> None:
    """Figures: `dram_blocks_before`, `dram_blocks_after_restart`, `dram_wrong`, `warm_restarts`."""
    clock = Clock(assignment)
    with MortalDaemon(assignment.directory / "warm", *SETTINGS) as daemon:
        daemon.start()
        for number in _numbers(clock, figures):
            _one_restart(daemon, assignment.seed % 1000 * 1000 + number, figures)
            figures.heartbeat(now=True)


def _numbers(clock: Clock, figures: Figures) -> Iterator[int]:
    """Return the numbers of the rounds: at least one round, so that even the shortest run has an answer."""
    number = 0
    while number == 0 or clock.goes_on(figures.counts["warm_restarts"]):
        yield number
        number += CONVERSATIONS


def _one_restart(daemon: MortalDaemon, first: int, figures: Figures) -> None:
    rng = np.random.default_rng(first)
    models = rng.integers(0, 2, CONVERSATIONS).tolist()
    chains = [Conversation("warm", model, first + number, BLOCKS) for number, model in enumerate(models)]
    for number, chain in enumerate(chains):
        with daemon.connect(chain.fingerprint) as session:
            mode = "always" if number % DURABLE_EVERY == 0 else "none"
            receipt = session.put(
                chain.tokens(BLOCKS), payloads=chain.payloads(BLOCKS), durability=mode, wait="settled"
            )
            chain.answered(receipt.durability)
            figures.add("dram_put_answered_throttled", BLOCKS - receipt.visible_blocks)
    before = [_in_dram(daemon, chain, figures) for chain in chains]
    daemon.kill9()
    figures.add("warm_restarts")
    try:
        daemon.start()
    except DaemonFailed as error:
        figures.fail("restart_failures", str(error))
        daemon.start()
    after = [_in_dram(daemon, chain, figures) for chain in chains]
    figures.add("dram_blocks_before", sum(before))
    figures.add("dram_blocks_after_restart", sum(after))
    for chain in chains:
        _judge_durable(daemon, chain, figures)
    for chain in chains:
        with daemon.connect(chain.fingerprint) as session:
            session.delete(chain.tokens(BLOCKS), deadline_s=10.0)


def _in_dram(daemon: MortalDaemon, chain: Conversation, figures: Figures) -> int:
    """Leading blocks that can be read in place at once, each compared with what was put."""
    with daemon.connect(chain.fingerprint) as session, session.get(chain.tokens(BLOCKS), promote=False) as lease:
        for block in range(len(lease)):
            if not np.array_equal(lease.payload(block), chain.payload(block)):
                figures.fail("dram_wrong", f"conversation {chain.number} block {block}")
        return len(lease)


def _judge_durable(daemon: MortalDaemon, chain: Conversation, figures: Figures) -> None:
    with daemon.connect(chain.fingerprint) as session, session.get(chain.tokens(BLOCKS)) as lease:
        if len(lease) < chain.durable_head:
            figures.fail("durable_lost", f"warm: conversation {chain.number}: {lease}")
