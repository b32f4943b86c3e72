"""The boundary at which all layer groups of a model can resume, asked of a real daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import count

import numpy as np
import pytest

from kvstore_client import Fingerprint, KVStoreError, LayerGroup, Session, StatePart, aio
from kvstore_client.results import ResumePoint
from tests.reference.running_daemon import RunningDaemon, running_daemon

B = 16  # tokens of a block
GROUPS = (
    LayerGroup(0, "full", layers=(0,), bytes_per_token_per_layer=8),
    LayerGroup(3, "sliding", 2 * B + 1, layers=(1, 2), bytes_per_token_per_layer=8),
    LayerGroup(7, "recurrent", layers=(3,), parts=(StatePart("conv", "bf16", (4, 3)), StatePart("ssm", "f32", (8, 8)))),
)
BLOCKS = 10
TOKENS = np.arange(BLOCKS * B + 3, dtype=np.int32)
_names = count()


@pytest.fixture(scope="module", params=[1024, 8], ids=["one message", "many messages"])
def daemon(request: pytest.FixtureRequest) -> Iterator[RunningDaemon]:
    with running_daemon(f"limits.max_keys={request.param}") as running:
        yield running


@pytest.fixture
def session(daemon: RunningDaemon) -> Iterator[Session]:
    model = Fingerprint("m", f"w{next(_names)}", block_tokens=B, engine_block_tokens=B, groups=GROUPS)
    with daemon.connect(model) as connected:
        yield connected


def store(session: Session, group: int, blocks: Iterable[int]) -> None:
    size = session.fingerprint.payload_bytes(group)
    for block in blocks:
        payload = np.full(size, group * 16 + block, np.uint8)
        receipt = session.put(TOKENS, payloads=[payload], first_block=block, group=group)
        assert receipt.stored_blocks == 1, receipt


def test_all_groups_agree_on_one_boundary(session: Session) -> None:
    store(session, 0, range(BLOCKS))
    assert session.resume_point(TOKENS) == ResumePoint(0, 0, 3, "never_stored")
    store(session, 3, (2, 3, 7, 8, 9))
    assert session.resume_point(TOKENS).ended_by == 7
    store(session, 7, (3, 7))
    point = session.resume_point(TOKENS)
    assert (point.blocks, point.tokens, point.ended_by, point.reason) == (4, 4 * B, 3, "never_stored")
    store(session, 7, (8,))
    point = session.resume_point(TOKENS)
    assert (point.blocks, point.ended_by, point.reason) == (9, 7, "never_stored") and point.estimated_load_s >= 0
    assert session.resume_point(TOKENS, max_blocks=9) == ResumePoint(9, 9 * B, None, "", point.estimated_load_s)
    assert session.resume_point(TOKENS, probe=True) == ResumePoint(9, 9 * B, 7, "absent")
    keys = {group.group_id: session.keys(TOKENS, group.group_id) for group in GROUPS}
    assert session.resume_point(keys=keys) == point  # type: ignore[arg-type]
    for group in GROUPS:
        needed = group.needed_blocks(point.blocks, B)
        with session.get(
            TOKENS, group=group.group_id, first_block=needed.start, max_blocks=len(needed), promote=False
        ) as lease:
            assert [int(lease.payload(place)[0]) for place in range(len(lease))] == [
                group.group_id * 16 + block for block in needed
            ]


def test_the_state_of_a_recurrent_group_is_shown_by_its_parts(session: Session) -> None:
    conv, ssm = np.arange(12, dtype="<u2").reshape(4, 3), np.arange(64, dtype="<f4").reshape(8, 8)
    payload = np.frombuffer(conv.tobytes() + ssm.tobytes(), np.uint8)
    assert session.fingerprint.payload_bytes(7) == len(payload) == 24 + 256
    session.put(TOKENS, payloads=[payload], first_block=3, group=7)
    with session.get(TOKENS, group=7, first_block=3, max_blocks=1) as lease:
        assert np.array_equal(np.asarray(lease.array(0, 0, kind="ssm")), ssm)
        assert np.asarray(lease.array(0, kind="ssm")).shape == (1, 8, 8)


def test_a_prompt_that_fills_no_block_is_said_to_be_short(session: Session) -> None:
    assert session.resume_point(TOKENS[:5]) == ResumePoint(reason="short")
    assert session.resume_point(TOKENS[:5], probe=True) == ResumePoint(reason="short")


def test_keys_are_of_every_group(session: Session) -> None:
    keys = session.keys(TOKENS, 0)
    assert keys is not None
    for wrong in ({0: keys}, keys, {0: keys, 3: keys[:2], 7: keys}):
        with pytest.raises(KVStoreError, match="keys= must"):
            session.resume_point(keys=wrong)  # type: ignore[arg-type]


def test_asyncio_is_the_same(daemon: RunningDaemon, session: Session) -> None:
    for group in GROUPS:
        store(session, group.group_id, range(3))

    async def resumed() -> ResumePoint:
        options = {"required": True, "deadline_s": 20.0, "connect_timeout_s": 30.0, "staging_bytes": 0}
        async with await aio.connect(daemon.socket_dir, fingerprint=session.fingerprint, **options) as connected:
            return await connected.resume_point(TOKENS)

    point = asyncio.run(resumed())
    assert (point.blocks, point.ended_by) == (3, 0)
