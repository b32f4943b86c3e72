"""Corruption under a running daemon, seen by its clients: a prefix with the right bytes, or a shorter one.

Owns rounds of: clients of two fingerprints have put the same token ids with other bytes; DRAM is emptied; slots on NVMe
are damaged at the places that the daemon itself lists; every client reads everything, then stores again what was lost.
The judge is the bytes that were put.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvstore_client import Session
from kvstore_proto.arena import HEADER_BYTES, read_header, slot_bytes
from kvstore_proto.v1 import admin_pb2 as pb
from torture_runs.figures import Assignment, Clock, Figures
from torture_runs.kill_model import MODELS, Bytes, Conversation
from torture_runs.mortal_daemon import MortalDaemon
from torture_runs.slot_damage import SLOT_DAMAGES, SlotBytes

SETTINGS = (
    "host.capacity=48MiB", "host.staging=8MiB", "host.arena=2MiB", "host.prefault=false", "nvme.capacity=32MiB",
    "nvme.slab=2MiB", "nvme.io_threads=2", "limits.max_block=1MiB", "durability.mode=always",
)  # fmt: skip
BLOCKS = 8
CONVERSATIONS = 12  # of each fingerprint
DAMAGES_A_ROUND = 40
ROUNDS_A_LIFE = 24


@dataclass(frozen=True)
class Place:
    """The place of a block's slot, and the image in it when it was sound."""

    path: str
    offset: int
    image: Bytes
    used_bytes: int


def torture(assignment: Assignment, figures: Figures) -> None:
    """Figures: `corruptions`, `served_wrong`, and how many reads found a shorter prefix."""
    rng = np.random.default_rng(assignment.seed)
    clock = Clock(assignment)
    chains = [
        Conversation(f"corrupt-{model}", model, number, BLOCKS)
        for model in range(len(MODELS))
        for number in range(CONVERSATIONS)
    ]
    former: dict[tuple[str, int], Bytes] = {}
    with MortalDaemon(assignment.directory / "corruption-daemon", *SETTINGS) as daemon:
        while clock.goes_on(figures.counts["corruptions"]):
            daemon.start()
            _life(daemon, chains, former, rng, clock, figures)
            daemon.kill9()


def _life(
    daemon: MortalDaemon,
    chains: list[Conversation],
    former: dict[tuple[str, int], Bytes],
    rng: np.random.Generator,
    clock: Clock,
    figures: Figures,
) -> None:
    with ExitStack() as stack:
        sessions = [stack.enter_context(daemon.connect(model)) for model in MODELS]
        for _ in range(ROUNDS_A_LIFE):
            if not clock.goes_on(figures.counts["corruptions"]):
                break
            _round(daemon, sessions, chains, former, rng, figures)
            figures.heartbeat()
        counters = daemon.admin("Status", pb.StatusRequest()).counters
        figures.add("corrupt_blocks_by_the_daemons_count", counters["corrupt_blocks"])


def _round(
    daemon: MortalDaemon,
    sessions: list[Session],
    chains: list[Conversation],
    former: dict[tuple[str, int], Bytes],
    rng: np.random.Generator,
    figures: Figures,
) -> None:
    for chain in chains:
        session = sessions[chain.model]
        receipt = session.put(chain.tokens(BLOCKS), payloads=chain.payloads(BLOCKS), wait="settled")
        figures.add("blocks_stored_again", receipt.stored_blocks)
    daemon.drop_host()
    places = _places(daemon)
    kinds = _damage(places, former, rng, figures)
    for chain in chains:
        with sessions[chain.model].get(chain.tokens(BLOCKS)) as lease:
            for block in range(len(lease)):
                if not np.array_equal(lease.payload(block), chain.payload(block)):
                    figures.fail("served_wrong", f"{chain.owner} {chain.number} block {block}, after {dict(kinds)}")
            figures.add("daemon_reads_shorter", int(len(lease) < BLOCKS))
            figures.add("daemon_reads_whole", int(len(lease) == BLOCKS))


def _places(daemon: MortalDaemon) -> list[Place]:
    """Every block on NVMe, as the daemon lists it, with the bytes of its slot."""
    listed = daemon.admin("Blocks", pb.BlocksRequest(tier="nvme", limit=4096)).blocks
    places = []
    for block in listed:
        path, _, offset = block.location.rpartition(":")
        with open(path, "rb", buffering=0) as file:
            header = read_header(os.pread(file.fileno(), HEADER_BYTES, int(offset)))
            stored_bytes = block.payload_bytes if isinstance(header, str) else header.stored_bytes
            raw = os.pread(file.fileno(), slot_bytes(stored_bytes), int(offset))
        image = np.frombuffer(raw, dtype=np.uint8)
        places.append(Place(path, int(offset), image, min(len(raw), HEADER_BYTES + stored_bytes)))
    return places


def _damage(
    places: list[Place], former: dict[tuple[str, int], Bytes], rng: np.random.Generator, figures: Figures
) -> Counter[str]:
    """Spoil some of them; `former` remembers what each place held in earlier rounds."""
    kinds: Counter[str] = Counter()
    chosen = rng.permutation(len(places))[:DAMAGES_A_ROUND].tolist()
    for position in chosen:
        place, other = places[position], places[int(rng.integers(len(places)))]
        kind = str(rng.choice(sorted(SLOT_DAMAGES)))
        size = place.image.nbytes
        before = _as_long(former.get((place.path, place.offset), other.image), size)
        slot = SlotBytes(place.image, place.used_bytes, before, _as_long(other.image, size))
        damaged = SLOT_DAMAGES[kind](rng, slot)
        if not np.array_equal(damaged[: place.used_bytes], place.image[: place.used_bytes]):
            with open(place.path, "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), damaged.tobytes(), place.offset)
            kinds[kind] += 1
            figures.add("corruptions")
            figures.add_kind("corruptions_by_kind", f"daemon_{kind}")
    for place in places:
        former[place.path, place.offset] = place.image
    return kinds


def _as_long(image: Bytes, nbytes: int) -> Bytes:
    made = np.zeros(nbytes, np.uint8)
    made[: min(nbytes, image.nbytes)] = image[:nbytes]
    return made
