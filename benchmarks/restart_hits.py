"""How many hits does a restart cost?

Conversations (popularity by Zipf) fill DRAM and NVMe several times over. Then the daemon is stopped in order, or
killed, and started again; the figure is the hits of the next 1,000 requests against the same requests without a
restart, for policy `lfu-ttl` in both tiers and for the defaults. The baseline beside it is a restart that forgets how
blocks were used (its usage file is removed). `--quick` asks fewer requests.

Expected: blocks survive either way, so what is lost is the order in which they leave.
"""

from __future__ import annotations

import tempfile
import time
from functools import cache
from pathlib import Path

import numpy as np
from support.blocks import Bytes, model, payloads, tokens_of
from support.report import AT_LEAST, Row, main, progress
from torture_runs.mortal_daemon import MortalDaemon

from kvstore_client import Session

BLOCK_BYTES = 64 << 10
SETTINGS = (
    "host.capacity=48MiB", "host.staging=8MiB", "host.arena=4MiB", "nvme.capacity=96MiB", "nvme.slab=4MiB",
)  # fmt: skip
POLICIES = {
    "lfu-ttl": ("host.policy=lfu-ttl", "nvme.policy=lfu-ttl"),
    "default": (),
}
CONVERSATIONS, MOST_BLOCKS, EXPONENT = 700, 12, 0.8
WANTED = 0.97


def measure(quick: bool) -> list[Row]:
    warm_up, asked = (1500, 500) if quick else (3000, 1000)
    rows: list[Row] = []
    for name, settings in POLICIES.items():
        plain = _hits(settings, "", warm_up, asked)
        for how in ("stop", "kill -9", "stop, forgetting", "kill -9, forgetting"):
            found = _hits(settings, how, warm_up, asked)
            progress(f"{name}: after {how} {found / plain:.3f} of {plain} blocks found")
            target = None if "forgetting" in how else WANTED
            rows.append(Row(f"after {how}, {name}", found, "blocks", plain, "no restart", AT_LEAST, target))
    return rows


def _hits(settings: tuple[str, ...], how: str, warm_up: int, asked: int) -> int:
    """Blocks found by the `asked` requests after the warm-up, with that kind of restart between."""
    random = np.random.default_rng(7)
    lengths = random.integers(3, MOST_BLOCKS + 1, CONVERSATIONS).tolist()
    weights = 1 / np.arange(1, CONVERSATIONS + 1) ** EXPONENT
    order = random.choice(CONVERSATIONS, warm_up + asked, p=weights / weights.sum()).tolist()
    with tempfile.TemporaryDirectory() as directory, MortalDaemon(Path(directory), *SETTINGS, *settings) as daemon:
        daemon.start()
        with daemon.connect(model(BLOCK_BYTES)) as session:
            for conversation in order[:warm_up]:
                _request(session, conversation + 1, lengths[conversation])
        if how:
            time.sleep(6)  # the file is written every five seconds
            if how.startswith("kill"):
                daemon.kill9()
            else:
                daemon.stop()
            if "forgetting" in how:
                (daemon.state_dir / "usage.npz").unlink(missing_ok=True)
            daemon.start()
        with daemon.connect(model(BLOCK_BYTES)) as session:
            return sum(_request(session, number + 1, lengths[number]) for number in order[warm_up:])


def _request(session: Session, conversation: int, blocks: int) -> int:
    """Read what is there of a conversation and store the rest; how many blocks were there."""
    tokens = tokens_of(conversation, blocks)
    with session.get(tokens) as lease:
        held = len(lease)
    if held < blocks:
        session.put(tokens, payloads=_payloads(blocks - held), first_block=held, wait="settled")
    return held


@cache
def _payloads(blocks: int) -> list[Bytes]:
    return payloads(blocks, BLOCK_BYTES)


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
