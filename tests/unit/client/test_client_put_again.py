"""Blocks of a put that are sent again: none is lost or forgotten, none waits for bytes that the put itself keeps."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from kvstore_client import Session, put
from kvstore_client.call import Call
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.fake_daemon import Client, FakeDaemon
from tests.reference.twelve_blocks import BLOCKS, FINGERPRINT, PAYLOADS, TOKENS
from tests.unit.client.test_client_put import SLOT, STORED, believe, staging_of

pytestmark = pytest.mark.usefixtures("each_stream")


def is_stored(session: Session) -> bool:
    with session.get(TOKENS) as lease:
        return len(lease) == BLOCKS and all(
            np.array_equal(lease.payload(block), PAYLOADS[block]) for block in range(BLOCKS)
        )


def test_a_put_does_not_wait_for_room_that_it_keeps_itself(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block 0 is wanted after all; those after it fill the loan and have to be sent again, after it."""
    daemon.knobs.staging_limit_bytes = 3 * SLOT
    with daemon.connect(FINGERPRINT) as session:
        believe(session, monkeypatch, 0)
        receipt = session.put(TOKENS, payloads=PAYLOADS)
        assert (receipt.statuses, receipt.reason) == (STORED, "")
        assert is_stored(session) and staging_of(session).used_bytes() == 0


def test_bytes_that_are_to_be_sent_again_are_not_reused_meanwhile(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread renews the loan just when an answer is there, and is not yet acted upon."""
    renewing = session._connection.current()
    assert renewing is not None and renewing.staging is not None
    staging, call, judge, is_renewing = renewing.staging, renewing.call, Call.judge, [False]

    def judge_beside_a_renewal(*arguments: Any) -> object:
        if not is_renewing[0]:
            is_renewing[0] = True
            staging.renew(call, 5.0)
            is_renewing[0] = False
        return judge(*arguments)

    session.put(TOKENS + 1, payloads=PAYLOADS)
    daemon.knobs.present_as_pending = 2
    monkeypatch.setattr(Call, "judge", judge_beside_a_renewal)
    assert session.put(TOKENS, payloads=PAYLOADS).statuses == STORED
    monkeypatch.undo()
    assert is_stored(session) and staging_of(session).used_bytes() == 0


def test_patience_with_other_clients_begins_with_the_wait_for_them(daemon: FakeDaemon, session: Session) -> None:
    """However long the put has been writing by then."""
    later_s = [0.0]
    session._clock = lambda: time.monotonic() + later_s[0]

    def write_slowly(destination: np.ndarray) -> None:
        later_s[0] += 1.0
        destination[:] = PAYLOADS[0]

    daemon.knobs.present_as_pending = 3
    receipt = session.put(TOKENS, payloads=[write_slowly, *PAYLOADS[1:]], deadline_s=60)
    assert (receipt.statuses, receipt.reason) == (STORED, "")
    assert is_stored(session)


def test_an_orphan_is_sent_again_only_while_a_block_before_it_is_to_come(daemon: FakeDaemon, session: Session) -> None:
    """Block 0: to be sent again, and then without room. All others hang on it."""
    daemon.knobs.present_as_pending, daemon.knobs.no_room = 1, True
    receipt = session.put(TOKENS, payloads=PAYLOADS)
    assert receipt.statuses == ["no_room"] * BLOCKS and "nothing in it may be evicted" in receipt.reason
    assert len(daemon.stores) == 2, "the second answer settles them all"
    assert staging_of(session).used_bytes() == 0


def test_an_orphan_of_a_refused_block_says_why_that_was_refused(daemon: FakeDaemon) -> None:
    """The daemon knows of the second message and of those after it only that the block before is missing."""
    daemon.knobs.max_keys, daemon.knobs.no_room = 5, True
    with daemon.connect(FINGERPRINT) as session:
        assert session.put(TOKENS, payloads=PAYLOADS).statuses == ["no_room"] * BLOCKS
        assert len(daemon.stores) > 1


def test_what_hangs_on_a_message_over_a_rate_is_sent_again_with_it(daemon: FakeDaemon) -> None:
    """The first of three messages is refused as a whole; the blocks of the others are orphans until it is stored."""
    daemon.knobs.max_keys = 5
    daemon.knobs.delay_s["store"] = 0.05  # all of them are under way by then
    answer, refused = daemon.answer, pb.Error(kind=pb.ERROR_KIND_THROTTLED, message="too many")

    def refuse_the_first(client: Client, request: pb.Request) -> list[pb.Response]:
        if request.HasField("store") and not daemon.log.count("store"):
            daemon.log.append("store")
            return [pb.Response(error=refused)]
        return answer(client, request)

    daemon.answer = refuse_the_first  # type: ignore[method-assign]
    with daemon.connect(FINGERPRINT) as session:
        receipt = session.put(TOKENS, payloads=PAYLOADS)
        assert (receipt.statuses, receipt.reason) == (STORED, "")
        assert len(daemon.blocks) == BLOCKS and staging_of(session).used_bytes() == 0


def test_a_refusal_over_a_rate_frees_its_bytes_also_when_the_stream_has_ended(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.put(TOKENS + 1, payloads=PAYLOADS)
    daemon.knobs.errors["store"] = pb.Error(kind=pb.ERROR_KIND_THROTTLED, message="too many")
    monkeypatch.setattr(Call, "judge", lambda *_: "no_daemon")
    assert session.put(TOKENS, payloads=PAYLOADS).statuses == ["failed"] * BLOCKS
    assert staging_of(session).used_bytes() == 0


def test_a_put_gives_up_a_block_that_another_client_never_finishes(
    daemon: FakeDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(put, "PENDING_PATIENCE_S", 0.0)
    daemon.knobs.present_as_pending = 1 << 30
    receipt = session.put(TOKENS, payloads=PAYLOADS)
    assert (receipt.statuses, len(daemon.stores)) == (["throttled"] * BLOCKS, 1)
    assert "another client" in receipt.reason
