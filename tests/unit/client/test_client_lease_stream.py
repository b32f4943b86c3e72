"""A stream of leases over answers that a test gives: what it says, what it keeps, and what closing it gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore_client.call import Late
from kvstore_client.lease import Lease, LeasedBlock
from kvstore_client.lease_stream import LeaseStream
from kvstore_proto.fingerprint import LayerGroup
from kvstore_proto.v1 import kvstore_pb2 as wire

GROUP = LayerGroup(0)
EXPECTED = wire.AcquireReply(more=True, tiers=bytes([wire.TIER_CODE_NVME] * 3), ready_us=[10, 20, 30])
END = wire.AcquireReply()


def run(first: int, *, lease_id: int) -> wire.AcquireReply:
    return wire.AcquireReply(more=True, first=first, blocks=1, lease_id=lease_id)


class Scene:
    """Call and source of a stream. Leases with an id in `unusable` hold no block that the client trusts. The first
    answer is there after `late_s`; waiting moves the clock, and nothing else does."""

    def __init__(
        self, replies: Sequence[wire.AcquireReply], unusable: Sequence[int] = (), *, late_s: float = 0.0
    ) -> None:
        self.replies = list(replies)
        self.unusable = unusable
        self.now, self.late_s, self.timeouts = 0.0, late_s, 0
        self.on_wait: Callable[[], None] = lambda: None
        self.released: list[int] = []
        self.abandoned = False
        self.counted: list[int] = []
        call: Any = self
        self.stream = LeaseStream(
            self,
            call,
            GROUP,
            60.0,
            on_close=lambda blocks, payload_bytes: self.counted.append(blocks),
            clock=lambda: self.now,
        )

    def wait(self, timeout_s: float) -> wire.Response | None:
        self.on_wait()
        if self.replies and self.now + timeout_s >= self.late_s:
            return wire.Response(acquire=self.replies.pop(0))
        self.now += timeout_s
        return None

    def result(self, timeout_s: float) -> wire.Response | None:
        response = self.wait(timeout_s)
        self.timeouts += response is None
        return response

    def judge(self, response: wire.Response) -> wire.Response:
        return response

    def cancel(self, late: Late) -> None:
        self.abandoned = True

    def lease_of(self, reply: wire.AcquireReply, timeout_s: float) -> Lease:
        if reply.lease_id in self.unusable:
            return Lease(reason="verify_failed")
        grant: Any = SimpleNamespace(
            block_tokens=64, is_alive=lambda: True, release=lambda: self.give_back(reply.lease_id)
        )
        block = LeasedBlock(np.zeros(8192, np.uint8), 0, 4096, 1, b"k" * 16)
        return Lease([block], grant, expires_in_s=60.0)

    def give_back(self, lease_id: int) -> None:
        self.released.append(lease_id)


def test_what_is_expected_is_known_before_a_block_has_come() -> None:
    scene = Scene([EXPECTED, run(0, lease_id=5), END])
    assert scene.stream.expect() == 3 == scene.stream.expect()
    assert scene.stream.tiers == ("nvme",) * 3 and scene.stream.ready_s == (1e-05, 2e-05, 3e-05)
    assert len(scene.replies) == 2, "it waited for no block"
    assert [first for first, _ in scene.stream] == [0]


def test_a_run_that_came_with_what_is_expected_is_handed_out_first() -> None:
    first = run(0, lease_id=5)
    first.MergeFrom(EXPECTED)
    scene = Scene([first, run(2, lease_id=6), run(1, lease_id=7), END])
    assert scene.stream.expect() == 3
    assert [first for first, _ in scene.stream] == [0, 2, 1]
    scene.stream.close()
    assert sorted(scene.released) == [5, 6, 7] and scene.counted == [3] and not scene.abandoned


def test_a_run_that_no_caller_took_is_given_back() -> None:
    scene = Scene([run(0, lease_id=5), run(1, lease_id=6), END])
    scene.stream.expect()
    scene.stream.close()
    assert scene.released == [5] and scene.abandoned
    assert list(scene.stream) == []
    scene.stream.close()
    assert scene.released == [5] and scene.counted == [1]


def test_a_run_that_did_not_verify_is_the_reason_in_the_end() -> None:
    scene = Scene([run(0, lease_id=5), run(1, lease_id=6), run(2, lease_id=7), END], unusable=[6])
    assert [first for first, _ in scene.stream] == [0, 2]
    assert (scene.stream.reason, scene.stream.blocks) == ("verify_failed", 2)


def test_an_answer_that_takes_long_is_no_timeout() -> None:
    scene = Scene([run(0, lease_id=5), END], late_s=30.0)
    assert [first for first, _ in scene.stream] == [0] and scene.timeouts == 0


def test_closing_ends_the_wait_of_another_thread_and_is_no_timeout() -> None:
    scene = Scene([run(0, lease_id=5)], late_s=50.0)
    scene.on_wait = lambda: scene.stream.close() if scene.now > 1.0 else None
    assert list(scene.stream) == []
    assert scene.now < 2.0 and scene.abandoned and scene.timeouts == 0


def test_without_an_answer_in_time_the_request_is_ended() -> None:
    scene = Scene([run(0, lease_id=5)])
    assert [first for first, _ in scene.stream] == [0]
    assert scene.stream.reason == "deadline" and scene.abandoned and scene.timeouts == 1
