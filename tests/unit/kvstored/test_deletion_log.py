"""The audit lines for deletes: one a user and second, with what all calls of that time took away."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvstored.clock import ManualClock
from kvstored.telemetry import DeletionLog


def _session(tenant: str, uid: int, pid: int = 7, client: str = "engine") -> Any:
    return SimpleNamespace(
        tenant=SimpleNamespace(name=tenant), peer=SimpleNamespace(uid=uid, pid=pid), client_name=client
    )


def test_one_line_a_user_and_second(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    deletions = DeletionLog(clock)
    with caplog.at_level(logging.INFO, "kvstored.audit"):
        deletions.note(_session("alice", 1000), 1, 4096)
        for _ in range(1000):
            deletions.note(_session("bob", 1001, client="en\ngine"), 2, 8192)
        deletions.note(_session("team", -1, pid=0, client="unary"), 3, 0)
        clock.advance(s=0.9)
        deletions.tick()
        assert not caplog.messages
        clock.advance(s=0.2)
        deletions.tick()
    assert caplog.messages == [
        "delete of alice: 1 block (4.0 KiB) in 1 call, by uid 1000, engine (pid 7)",
        "delete of bob: 2,000 blocks (7.8 MiB) in 1000 calls, by uid 1001, last en\\ngine (pid 7)",
        "delete of team: 3 blocks (0 B) in 1 call, by unary call, unary",
    ]
    caplog.clear()
    clock.advance(s=2)
    deletions.tick()
    assert not caplog.messages, "what was written is not written again"


def test_what_is_left_is_written_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    deletions = DeletionLog(ManualClock())
    with caplog.at_level(logging.INFO, "kvstored.audit"):
        deletions.note(_session("alice", 1000), 5, 4096)
        deletions.close()
    assert len(caplog.messages) == 1
