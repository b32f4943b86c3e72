"""How many hits does a restart cost?

Requests fill DRAM and NVMe several times over. Then the daemon is stopped in order, or killed, and started again; the
figure is the hits of the next 1,000 requests against the same requests without a restart. The baseline beside it is a
restart that forgets what the daemon knew of its blocks' use (its usage file is removed). `--quick` asks fewer requests.

Two workloads: conversations (popularity by Zipf); and a mix of documents (by Zipf), sessions of two to eight turns with
pauses, and prompts that are used once. Policies: `lfu-ttl` in both tiers, the defaults (`chain-hazard` in DRAM,
`lfu-ttl` on NVMe), and for the mix `chain-hazard` in both.

Expected: blocks survive either way, so what is lost is the order in which they leave.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import cache
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt
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
    "chain-hazard": ("host.policy=chain-hazard", "nvme.policy=chain-hazard"),
}
CONVERSATIONS, MOST_BLOCKS, EXPONENT = 700, 12, 0.8
DOCUMENTS, SESSION_SHARE, ONE_OFF_SHARE, PAUSE = 400, 0.12, 0.25, 150  # requests between two turns, on the mean
WANTED = 0.97
Requests = list[tuple[int, int]]  # a conversation's number and how many blocks of it


def conversations(requests: int) -> Requests:
    random = np.random.default_rng(7)
    lengths = random.integers(3, MOST_BLOCKS + 1, CONVERSATIONS).tolist()
    order = random.choice(CONVERSATIONS, requests, p=_zipf(CONVERSATIONS)).tolist()
    return [(number + 1, lengths[number]) for number in order]


def mix(requests: int) -> Requests:
    random = np.random.default_rng(11)
    lengths = random.integers(3, MOST_BLOCKS + 1, DOCUMENTS).tolist()
    fresh = count(DOCUMENTS + 1)
    waiting: list[tuple[int, int, int, int]] = []  # sessions: at which request, number, blocks, turns left
    found: Requests = []
    while len(found) < requests:
        at, kind = len(found), random.random()
        session = None
        if waiting and waiting[0][0] <= at:
            session = heappop(waiting)[1:]
        elif kind < SESSION_SHARE:
            session = next(fresh), int(random.integers(2, 6)), int(random.integers(2, 9))
        if session is not None:
            number, blocks, turns = session
            found.append((number, blocks))
            if turns > 1:
                due = at + 5 + round(random.exponential(PAUSE))
                heappush(waiting, (due, number, blocks + int(random.integers(1, 4)), turns - 1))
        elif kind < SESSION_SHARE + ONE_OFF_SHARE:
            found.append((next(fresh), int(random.integers(3, MOST_BLOCKS + 1))))
        else:
            document = int(random.choice(DOCUMENTS, p=_zipf(DOCUMENTS)))
            found.append((document + 1, lengths[document]))
    return found


WORKLOADS: dict[str, tuple[Callable[[int], Requests], tuple[str, ...]]] = {
    "conversations": (conversations, ("lfu-ttl", "default")),
    "mix": (mix, tuple(POLICIES)),
}


def measure(quick: bool) -> list[Row]:
    warm_up, asked = (900, 400) if quick else (3000, 1000)
    rows: list[Row] = []
    for workload, (requests_of, policies) in WORKLOADS.items():
        requests = requests_of(warm_up + asked)
        for name in policies:
            plain = _hits(POLICIES[name], "", requests, warm_up)
            for how in ("stop", "kill -9", "stop, forgetting", "kill -9, forgetting"):
                found = _hits(POLICIES[name], how, requests, warm_up)
                progress(f"{workload}, {name}: after {how} {found / plain:.3f} of {plain} blocks found")
                target = None if "forgetting" in how else WANTED
                rows.append(
                    Row(f"{workload}, after {how}, {name}", found, "blocks", plain, "no restart", AT_LEAST, target)
                )
    return rows


def _hits(settings: tuple[str, ...], how: str, requests: Requests, warm_up: int) -> int:
    """Blocks found by the requests after the warm-up, with that kind of restart between."""
    with tempfile.TemporaryDirectory() as directory, MortalDaemon(Path(directory), *SETTINGS, *settings) as daemon:
        daemon.start()
        with daemon.connect(model(BLOCK_BYTES)) as session:
            for request in requests[:warm_up]:
                _request(session, *request)
        time.sleep(6)  # the file is written every five seconds; without a restart blocks get as old
        if how:
            if how.startswith("kill"):
                daemon.kill9()
            else:
                daemon.stop()
            if "forgetting" in how:
                (daemon.state_dir / "usage.npz").unlink(missing_ok=True)
            daemon.start()
        with daemon.connect(model(BLOCK_BYTES)) as session:
            return sum(_request(session, *request) for request in requests[warm_up:])


def _request(session: Session, conversation: int, blocks: int) -> int:
    """Read what is there of a conversation and store the rest; how many blocks were there."""
    tokens = tokens_of(conversation, blocks)
    with session.get(tokens) as lease:
        held = len(lease)
    if held < blocks:
        session.put(tokens, payloads=_payloads(blocks - held), first_block=held, wait="settled")
    return held


@cache
def _zipf(items: int) -> npt.NDArray[np.float64]:
    weights = 1 / np.arange(1, items + 1) ** EXPONENT
    chances: npt.NDArray[np.float64] = weights / weights.sum()
    return chances


@cache
def _payloads(blocks: int) -> list[Bytes]:
    return payloads(blocks, BLOCK_BYTES)


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
