"""A prefix handed out by layer range: each range verified alone, in its turn, and nothing of it left behind."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_client import Fingerprint, LayerGroup, Session, aio
from kvstore_proto.errors import KVStoreError
from kvstore_proto.v1 import admin_pb2
from tests.reference.conversations import TOKENS_A_BLOCK, tokens_of
from tests.reference.damage import flip_on_disk
from tests.reference.examples import each_nth
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

LAYERS, RANGES, BLOCKS = 7, 3, 6
WHOLE = LayerGroup(4, "full", 0, tuple(range(LAYERS)), 64)
MODEL = Fingerprint("test model", "weights", groups=WHOLE.split(RANGES))
TOKENS = tokens_of(1, BLOCKS)
DYING = f"""
import os, signal, sys
import kvstore_client
from kvstore_proto.fingerprint import parse_fingerprint
from tests.reference.conversations import tokens_of

fingerprint = parse_fingerprint(sys.argv[2].encode())
session = kvstore_client.connect(sys.argv[1], fingerprint=fingerprint, required=True, deadline_s=20.0)
next(next(iter(session.get_layers(tokens_of(1, {BLOCKS})))))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("movement.in_flight=1", "scrub.enabled=false") as running:
        yield running


@pytest.fixture
def session(daemon: RunningDaemon) -> Iterator[Session]:
    with daemon.connect(MODEL) as connected:
        yield connected


def payloads_of(group: LayerGroup, first: int = 0, blocks: int = BLOCKS) -> list[npt.NDArray[np.uint8]]:
    size = len(group.layers) * group.bytes_per_token_per_layer * TOKENS_A_BLOCK
    return [
        np.random.default_rng((group.group_id, block)).integers(0, 256, size, dtype=np.uint8)
        for block in range(first, first + blocks)
    ]


def leave_on_nvme(daemon: RunningDaemon, session: Session) -> None:
    for group in MODEL.groups:
        receipt = session.put(
            TOKENS, payloads=payloads_of(group), group=group.group_id, wait="settled", durability="always"
        )
        assert receipt.statuses == ["stored"] * BLOCKS
    daemon.drop("host")


def nothing_is_held(daemon: RunningDaemon) -> bool:
    return daemon.status().leases == 0 and daemon.ask("Drop", admin_pb2.DropRequest(all=True)).kept_blocks == 0


def test_ranges_come_one_after_the_other_each_with_its_bytes(daemon: RunningDaemon, session: Session) -> None:
    leave_on_nvme(daemon, session)
    layers: list[int] = []
    with session.get_layers(TOKENS) as streams:
        assert len(streams) == RANGES
        assert min(stream.expect() for stream in streams) == BLOCKS
        ready_s = [each for stream in streams for each in stream.ready_s]
        assert ready_s == sorted(ready_s), "a range is expected after those before it"
        for stream in streams:
            payloads = payloads_of(stream.group)
            for first, lease in stream:
                assert lease.valid
                for at in range(lease.blocks):
                    assert bytes(lease.payload(at)) == bytes(payloads[first + at])
                    assert len(lease.layer(at, 0)) * len(stream.group.layers) == len(payloads[0])
            assert (stream.blocks, stream.reason) == (BLOCKS, "")
            assert stream.tiers == ("nvme",) * BLOCKS
            layers += stream.group.layers
    assert layers == list(range(LAYERS))
    assert eventually(lambda: nothing_is_held(daemon))


def test_the_caller_chooses_the_ranges_and_their_order(daemon: RunningDaemon, session: Session) -> None:
    leave_on_nvme(daemon, session)
    with session.get_layers(TOKENS, groups=(6, 4), order="back", max_blocks=4) as streams:
        assert [stream.group.group_id for stream in streams] == [6, 4]
        for stream in streams:
            came = [first for first, _ in stream]
            assert came == sorted(came, reverse=True) and stream.blocks == 4
    with pytest.raises(KVStoreError, match="no layer group 9"):
        session.get_layers(TOKENS, groups=(4, 9))
    assert eventually(lambda: nothing_is_held(daemon))


@pytest.mark.parametrize("damaged", each_nth([group.group_id for group in MODEL.groups], 2))
def test_damage_in_one_range_ends_that_range_alone(daemon: RunningDaemon, session: Session, damaged: int) -> None:
    leave_on_nvme(daemon, session)
    assert flip_on_disk(daemon, depth=2, group=damaged) == 1
    with session.get_layers(TOKENS) as streams:
        assert [stream.expect() for stream in streams] == [BLOCKS] * RANGES
        for stream in streams:
            payloads = payloads_of(stream.group)
            came = set()
            for first, lease in stream:
                for at in range(lease.blocks):
                    assert bytes(lease.payload(at)) == bytes(payloads[first + at])
                    came.add(first + at)
            is_damaged = stream.group.group_id == damaged
            assert came >= {0, 1} and (2 in came) != is_damaged
            assert stream.reason == ("corrupt" if is_damaged else "")
            if not is_damaged:
                assert came == set(range(BLOCKS))
    with session.get_layers(TOKENS) as streams:
        assert min(stream.expect() for stream in streams) == 2
    assert eventually(lambda: nothing_is_held(daemon))


def test_a_range_that_is_not_stored_is_known_before_another_is_loaded() -> None:
    with (
        running_daemon("movement.in_flight=1", failpoints="nvme.read=delay:0.05") as daemon,
        daemon.connect(MODEL) as session,
    ):
        first = MODEL.groups[0]
        session.put(TOKENS, payloads=payloads_of(first), group=first.group_id, wait="settled", durability="always")
        daemon.drop("host")
        with session.get_layers(TOKENS) as streams:
            assert [stream.expect() for stream in streams] == [BLOCKS, 0, 0]
            assert [stream.reason for stream in streams] == ["", "never_stored", "never_stored"]
        assert eventually(lambda: nothing_is_held(daemon))
        assert daemon.status().counters["promoted_blocks"] < BLOCKS, "and then it is not loaded"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["left", "closed", "killed"])
def test_a_client_that_goes_in_the_first_range_leaves_nothing(how: str) -> None:
    with (
        running_daemon("movement.in_flight=1", failpoints="nvme.read=delay:0.02") as daemon,
        daemon.connect(MODEL) as session,
    ):
        leave_on_nvme(daemon, session)
        if how == "killed":
            arguments = [sys.executable, "-c", DYING, str(daemon.socket_dir), MODEL.canonical().decode()]
            assert subprocess.run(arguments, timeout=60.0, check=False).returncode == -signal.SIGKILL
        else:
            with daemon.connect(MODEL) as leaving:
                streams = leaving.get_layers(TOKENS)
                next(next(iter(streams)))
                if how == "left":
                    streams.close()
                    assert eventually(lambda: nothing_is_held(daemon))
        assert eventually(lambda: nothing_is_held(daemon))
        assert daemon.status().counters["promoted_blocks"] < RANGES * BLOCKS


def test_the_asyncio_session_has_ranges_too(daemon: RunningDaemon, session: Session) -> None:
    leave_on_nvme(daemon, session)

    async def read() -> list[int]:
        blocks = []
        async with await aio.connect(daemon.socket_dir, fingerprint=MODEL, required=True, deadline_s=20.0) as other:
            with await other.get_layers(TOKENS) as streams:
                assert [await stream.expect() for stream in streams] == [BLOCKS] * RANGES
                for stream in streams:
                    payloads = payloads_of(stream.group)
                    async for first, lease in stream:
                        assert bytes(lease.payload(0)) == bytes(payloads[first])
                    blocks.append(stream.blocks)
        return blocks

    assert asyncio.run(read()) == [BLOCKS] * RANGES
    assert eventually(lambda: nothing_is_held(daemon))
