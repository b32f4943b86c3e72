"""Layer groups that keep a window or a state, in a real daemon: what leaves first when room is short, what a restart
finds, and what a deletion takes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_client import Fingerprint, LayerGroup, Session, StatePart
from kvstore_client.results import ResumePoint
from kvstore_proto.identity import BlockKeys
from kvstore_proto.v1.explain_pb2 import BlockExplanation, ExplainRequest
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

pytestmark = pytest.mark.slow
B, KIB = 16, 1024
# Each block has 16 KiB of payload.
FULL = LayerGroup(0, "full", layers=(0,), bytes_per_token_per_layer=KIB)
SLIDING = LayerGroup(1, "sliding", 2 * B + 1, layers=(1, 2), bytes_per_token_per_layer=512)
STATE = LayerGroup(2, "recurrent", layers=(3,), parts=(StatePart("state", "f32", (4 * KIB,)),))
MODEL = Fingerprint("m", "w", block_tokens=B, engine_block_tokens=B, groups=(FULL, SLIDING, STATE))
SMALL = ("host.capacity=8MiB", "host.staging=2MiB", "host.arena=1MiB", "nvme.enabled=false")
SMALL_NVME = ("host.capacity=5MiB", "host.staging=2MiB", "host.arena=1MiB", "nvme.capacity=6MiB", "nvme.slab=1MiB")


def prompt(conversation: int, blocks: int, shared: int = 0) -> npt.NDArray[np.int32]:
    """Tokens of a conversation whose first `shared` blocks are a system prompt that all have."""
    tokens = np.arange(blocks * B, dtype=np.int32) + 100_000 * (conversation + 1)
    tokens[: shared * B] = np.arange(shared * B)
    return tokens


def payload(conversation: int, group: int, block: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng((conversation, group, block)).integers(0, 256, 16 * KIB, dtype=np.uint8)


def put(session: Session, conversation: int, blocks: int, shared: int = 0, groups: tuple[int, ...] = (0, 1, 2)) -> None:
    """Store what is missing of a conversation. The payloads of shared blocks are conversation 0's."""
    tokens = prompt(conversation, blocks, shared)
    for group in groups:
        owners = [0 if block < shared else conversation for block in range(blocks)]
        payloads = [payload(owner, group, block) for block, owner in enumerate(owners)]
        receipt = session.put(tokens, payloads=payloads, group=group, wait="settled")
        assert receipt.visible_blocks == blocks, receipt


def resumed(session: Session, conversation: int, blocks: int, shared: int = 0) -> ResumePoint:
    """Return the point where a conversation can resume, after reading and comparing all blocks needed there."""
    tokens = prompt(conversation, blocks, shared)
    point = session.resume_point(tokens)
    for group in MODEL.groups:
        needed = group.needed_blocks(point.blocks, B)
        if not needed:
            continue
        with session.get(
            tokens, group=group.group_id, first_block=needed.start, max_blocks=len(needed), deadline_s=20.0
        ) as lease:
            assert len(lease) == len(needed), (group, lease.reason)
            for place, block in enumerate(needed):
                expected = payload(0 if block < shared else conversation, group.group_id, block)
                assert np.array_equal(lease.payload(place), expected)
    return point


def explained(daemon: RunningDaemon, keys: BlockKeys) -> list[BlockExplanation]:
    reply = daemon.ask("Explain", ExplainRequest(keys=[key.hex() for key in keys]))
    return list(reply.blocks)


def test_what_no_boundary_needs_leaves_first() -> None:
    """A conversation of 24 blocks needs 24 + 2 + 1 blocks of the 72 that its groups store. Eight fit into 8 MiB with
    the blocks that they need, and not with all.
    """
    with running_daemon(*SMALL) as daemon, daemon.connect(MODEL) as session:
        for conversation in range(1, 9):
            put(session, conversation, 24)
        assert daemon.status().counters["evicted_blocks"] > 150
        assert [resumed(session, conversation, 24).blocks for conversation in range(1, 9)] == [24] * 8
        shorter = session.resume_point(prompt(1, 20))
        assert (shorter.blocks, shorter.ended_by, shorter.reason) == (0, 1, "evicted")


@pytest.mark.parametrize("room", ["dram", "nvme"])
def test_blocks_before_a_gap_leave_first_too(room: str) -> None:
    """An engine that is ahead of the daemon gives up windows before they are stored. What was stored before
    that gap ends no prompt.
    """
    with running_daemon(*(SMALL if room == "dram" else SMALL_NVME)) as daemon, daemon.connect(MODEL) as session:
        for conversation in range(1, 9):
            tokens = prompt(conversation, 24)
            for first in range(24):
                for group in (0, 1, 2) if first % 5 < 3 or first > 21 else (0,):
                    receipt = session.put(
                        tokens, first_block=first, payloads=[payload(conversation, group, first)], group=group
                    )
                    assert receipt.visible_blocks == 1, receipt
        assert daemon.status().counters["evicted_blocks"] > 80
        assert [resumed(session, conversation, 24).blocks for conversation in range(1, 9)] == [24] * 8


def test_a_shared_system_prompt_resumes_where_it_ends() -> None:
    with running_daemon(*SMALL) as daemon, daemon.connect(MODEL) as session:
        for conversation in range(1, 9):
            put(session, conversation, 24, shared=10)
        assert daemon.status().counters["evicted_blocks"] > 50
        new = resumed(session, 99, 24, shared=10)
        assert (new.blocks, new.ended_by, new.reason) == (10, 0, "never_stored")


def test_a_restart_finds_every_kind_and_what_leaves_first() -> None:
    with running_daemon(
        "host.capacity=8MiB", "host.staging=2MiB", "host.arena=1MiB", "nvme.admission=always"
    ) as daemon:
        with daemon.connect(MODEL) as session:
            put(session, 1, 24)
            assert eventually(lambda: daemon.status().counters["stored_blocks"] == 72)
        daemon.stop()
        daemon.restart()
        with daemon.connect(MODEL) as session:
            assert resumed(session, 1, 24).blocks == 24
            keys = session.keys(prompt(1, 24), 1)
            assert keys is not None
            listed = explained(daemon, keys)
            assert [block.state for block in listed] == ["stored"] * 24
            assert [block.block.spent for block in listed] == [True] * 22 + [False] * 2


def test_a_chain_with_holes_is_deleted_whole_and_a_branch_stays() -> None:
    with running_daemon(*SMALL) as daemon, daemon.connect(MODEL) as session:
        for conversation in range(1, 9):
            put(session, conversation, 24, shared=4)
        for group in (1, 2):
            held = session.lookup(prompt(1, 24, 4), group=group).tiers
            assert "absent" in held and held[-1] == "host"
        for group in range(3):
            deleted = session.delete(prompt(1, 24, 4), group=group)
            assert deleted.blocks > 0 and deleted.leased == 0
            assert set(session.lookup(prompt(1, 24, 4), group=group).tiers[4:]) == {"absent"}
        assert resumed(session, 2, 24, shared=4).blocks == 24
        for conversation in range(1, 9):
            for group in range(3):
                session.delete(prompt(conversation, 24, 4), group=group)
        assert eventually(lambda: daemon.status().blocks == 0)
